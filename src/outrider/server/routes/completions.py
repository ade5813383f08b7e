"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.grammars import grammar_of
from outrider.server.front.problems import Problem
from outrider.server.front.sampling import sampling_params
from outrider.server.front.service import Service
from outrider.server.front.totals import Totals
from outrider.server.front.transfers import HandOff, asks_for_hand_over, cut_to_first_token, hand_off_of
from outrider.server.http.bodies import JsonRoute
from outrider.server.messages import Delta, Submit
from outrider.server.protocol.completions import CompletionRequest
from outrider.server.routes.chunks import Chunks, extras
from outrider.server.routes.documented import GENERATES
from outrider.server.routes.logprobs import CompletionLogprobs, merged
from outrider.server.routes.respond import order_for, respond, service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses=GENERATES, summary="Continue one prompt or several")
async def completions(body: CompletionRequest, request: Request) -> Response:
    service = service_of(request)
    model = service.model_name(body.model)
    service.check_ready()
    body = cut_to_first_token(body)
    _check(body)
    prompts = await _prompts(body, service)
    params = sampling_params(
        body,
        service.config,
        service.facts,
        # With echo, max_tokens may be 0; the engine then generates one token, which is left out.
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        grammar=grammar_of(body, service.config),
    )
    name = f"cmpl-{secrets.token_hex(12)}"
    orders = []
    for place, (_text, ids) in enumerate(prompts):
        service.check_length(ids, params, param="prompt")
        orders.append(order_for(request, body, f"{name}-{place}", ids, params))
    writer = CompletionWriter(service, body, orders, [text for text, _ids in prompts], name=name, model=model)
    return await respond(request, orders, writer, name=name, model=model, stream=bool(body.stream))


def _check(body: CompletionRequest) -> None:
    if body.best_of not in (None, body.n or 1):
        raise Problem("best_of must equal n: answers are not ranked here; leave it out", param="best_of")
    if body.suffix:
        raise Problem("suffix is not supported: text is only continued, not filled in; leave it out", param="suffix")
    if body.max_completion_tokens is not None and not asks_for_hand_over(body):
        raise Problem(
            "max_completion_tokens is a field of chats; use max_tokens for completions", param="max_completion_tokens"
        )
    if body.max_tokens == 0 and not body.echo:
        raise Problem("max_tokens is 0, so there would be no answer; give at least 1, or echo", param="max_tokens")
    if body.echo and body.stream and body.logprobs is not None:
        raise Problem(
            "echo with logprobs cannot be streamed, since those of the prompt come last; leave stream out",
            param="stream",
        )


async def _prompts(body: CompletionRequest, service: Service) -> list[tuple[str, list[int]]]:
    """Returns the text and the token ids of each prompt."""
    given = body.prompt
    if isinstance(given, str):
        items: list[Any] = [given]
    elif given and isinstance(given[0], int):
        items = [given]
    else:
        items = list(given)
    if not items:
        raise Problem("prompt is an empty list; send at least one", param="prompt")
    if len(items) > 1 and hand_off_of(body, service.facts) != HandOff():
        raise Problem(
            f"a request with kv_transfer_params has one prompt, got {len(items)}; send several requests", param="prompt"
        )
    if len(items) > service.config.prompts_max:
        raise Problem(f"at most {service.config.prompts_max} prompts in one request, got {len(items)}", param="prompt")
    prompts = []
    for item in items:
        if isinstance(item, str):
            ids = await service.encode(item, add_special_tokens=body.add_special_tokens)
            text = item
        else:
            ids = item
            service.check_token_ids(ids, "prompt")
            text = service.token_texts.tokenizer.decode(ids) if body.echo else ""
        service.check_not_empty(ids, "prompt")
        prompts.append((text, ids))
    return prompts


class CompletionWriter:
    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        orders: list[Submit],
        prompts: list[str],
        *,
        name: str,
        model: str,
    ) -> None:
        self._service = service
        self._body = body
        self._orders = orders
        self._prompts = prompts
        self._n = body.n or 1
        self._deltas: list[list[Delta]] = [[] for _ in range(len(orders) * self._n)]
        self._logprobs = [CompletionLogprobs(service.token_texts) for _ in self._deltas]
        self._common = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
        self._chunks = Chunks(body, self._common)

    # ---- as a stream -------------------------------------------------------------------------------

    def first(self) -> Iterable[bytes]:
        if not self._body.echo:
            return
        for choice in range(len(self._deltas)):
            text = self._prompts[choice // self._n]
            yield self._chunks.chunk([{"index": choice, "text": text, "logprobs": None, "finish_reason": None}])

    def delta(self, place: int, delta: Delta, totals: Totals) -> Iterable[bytes]:
        choice = place * self._n + delta.index
        if not self._body.stream:
            self._deltas[choice].append(delta)
            return
        if self._body.max_tokens == 0:
            delta = _without_output(delta)
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs[choice].part(delta.logprobs, delta.token_ids, delta.pieces)
        entry = self._choice(choice, delta.text, logprobs, [delta])
        yield self._chunks.delta(entry, totals, self._usage(totals))

    def last(self, totals: Totals) -> Iterable[bytes]:
        return self._chunks.last(totals, self._usage(totals))

    def failed(self, problem: Problem) -> Iterable[bytes]:
        return self._chunks.failed(problem)

    # ---- whole -------------------------------------------------------------------------------------

    def whole(self, totals: Totals) -> dict[str, Any]:
        choices = []
        for choice, deltas in enumerate(self._deltas):
            prompt = choice // self._n
            if self._body.max_tokens == 0:
                deltas = [_without_output(delta) for delta in deltas]
            text = "".join(delta.text for delta in deltas)
            if self._body.echo:
                text = self._prompts[prompt] + text
            choices.append(self._choice(choice, text, self._whole_logprobs(choice, deltas, totals), deltas))
        return {**self._common, "choices": choices, "usage": self._usage(totals), "metrics": totals.metrics()}

    def _whole_logprobs(self, choice: int, deltas: list[Delta], totals: Totals) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        texts, parts = self._logprobs[choice], []
        if self._body.echo:
            ids = self._orders[choice // self._n].prompt_token_ids
            # The continuations of a prompt have one ending in common.
            ending = next(
                delta.ending
                for each in self._deltas[choice // self._n * self._n :][: self._n]
                for delta in each
                if delta.ending is not None
            )
            parts.append(texts.prompt(ending.prompt_logprobs or [], ids, self._prompts[choice // self._n]))
        for delta in deltas:
            parts.append(texts.part(delta.logprobs or [], delta.token_ids, delta.pieces))
        return merged(parts)

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None, deltas: list[Delta]) -> dict[str, Any]:
        last = deltas[-1]
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            **extras(self._body, deltas),
        }

    def _usage(self, totals: Totals) -> dict[str, Any]:
        usage = totals.usage()
        if self._body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


def _without_output(delta: Delta) -> Delta:
    """Returns the delta without its output, for a request for no tokens."""
    return msgspec.structs.replace(
        delta,
        **{"text": "", "token_ids": [], "pieces": [], "origins": "", "stop_reason": None},
        logprobs=None if delta.logprobs is None else [],
        finish_reason="length" if delta.finish_reason is not None else None,
    )
