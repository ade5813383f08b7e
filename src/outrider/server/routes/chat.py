"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.conversation import check_tool_choice, render_order
from outrider.server.front.grammars import check_size, grammar_of
from outrider.server.front.problems import Problem
from outrider.server.front.sampling import sampling_params
from outrider.server.front.service import Service
from outrider.server.front.tool_calls import CallPiece, Found, ParsedCall, forced_grammar, parser_for, with_piece
from outrider.server.front.totals import Totals
from outrider.server.front.transfers import cut_to_first_token
from outrider.server.http.bodies import JsonRoute
from outrider.server.messages import Delta, Submit
from outrider.server.protocol.chat import ChatRequest
from outrider.server.routes.chunks import Chunks, extras
from outrider.server.routes.documented import GENERATES
from outrider.server.routes.logprobs import chat_logprobs
from outrider.server.routes.respond import order_for, respond, service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=GENERATES, summary="Answer a conversation")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    service = service_of(request)
    model = service.model_name(body.model)
    service.check_ready()
    body = cut_to_first_token(body)
    name = f"chatcmpl-{secrets.token_hex(12)}"
    order = await chat_order(body, request, name=name)
    writer = ChatWriter(service, body, order, name=name, model=model)
    return await respond(request, [order], writer, name=name, model=model, stream=bool(body.stream))


async def chat_order(body: ChatRequest, request: Request, *, name: str) -> Submit:
    """Returns the order to the engine for a conversation."""
    service = service_of(request)
    config = service.config
    check_tool_choice(body, service.facts)
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem("top_logprobs needs logprobs: true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise Problem("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    grammar, forced = grammar_of(body, config), forced_grammar(body)
    if forced is not None:
        if grammar is not None:
            raise Problem(
                "tool_choice forces a call, so no other structured output is possible; leave one of them out",
                param="tool_choice",
            )
        check_size(forced, config, param="tools")
        grammar = forced
    # Without max_tokens an answer may fill the context.
    params = sampling_params(
        body,
        config,
        service.facts,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    ids = await service.render(
        render_order(
            body, config, service.facts, with_tools=body.tool_choice != "none", tokens_max=service.prompt_tokens_max
        )
    )
    service.check_not_empty(ids, "messages")
    service.check_length(ids, params, param="messages")
    return order_for(request, body, name, ids, params)


class ChatChoice:
    """One answer: its text, and the tool calls in it."""

    def __init__(self, body: ChatRequest) -> None:
        self._parser = parser_for(body.tools, body.tool_choice)
        self._one_call = body.parallel_tool_calls is False
        self._closed = False
        self.has_role = False
        """Whether its role has been sent."""
        self.text: list[str] = []
        self.calls: list[ParsedCall] = []
        self.deltas: list[Delta] = []

    def take(self, delta: Delta, *, keep: bool) -> Found:
        found = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            rest = self._parser.finish()
            found = Found(found.text + rest.text, found.calls + rest.calls)
        pieces = []
        for piece in found.calls:
            number = len(self.calls) + (piece.name is not None)
            if self._one_call and (number > 1 or self._closed):
                # Every piece of a second call is left out.
                self._closed = True
                continue
            self.calls = with_piece(self.calls, piece)
            pieces.append(piece)
        found = found._replace(calls=tuple(pieces))
        if keep:
            self.text.append(found.text)
            self.deltas.append(delta)
        return found

    def finish_reason(self, delta: Delta) -> str | None:
        return "tool_calls" if delta.finish_reason == "stop" and self.calls else delta.finish_reason


class ChatWriter:
    def __init__(self, service: Service, body: ChatRequest, order: Submit, *, name: str, model: str) -> None:
        self._service = service
        self._body = body
        self._order = order
        self._choices = [ChatChoice(body) for _ in range(body.n or 1)]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._common = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._chunks = Chunks(body, self._common)

    # ---- as a stream -------------------------------------------------------------------------------

    def first(self) -> Iterable[bytes]:
        # The role comes with the first token: clients that measure take the first chunk with a choice for it.
        return ()

    def delta(self, place: int, delta: Delta, totals: Totals) -> Iterable[bytes]:
        choice = self._choices[delta.index]
        before = len(choice.calls)
        found = choice.take(delta, keep=not self._body.stream)
        if not self._body.stream:
            return
        if not choice.has_role:
            choice.has_role = True
            role = {"role": "assistant", "content": ""}
            used: dict[str, Any] = {"usage": totals.usage()} if self._body.wants_usage_always else {}
            entry = {"index": delta.index, "delta": role, "logprobs": None, "finish_reason": None}
            yield self._chunks.chunk([entry], **used)
        content: dict[str, Any] = {"content": found.text} if found.text else {}
        if found.calls:
            content["tool_calls"] = [*_call_deltas(found.calls, before)]
        entry = {
            "index": delta.index,
            "delta": content,
            "logprobs": self._logprobs([delta]),
            "finish_reason": choice.finish_reason(delta),
            "stop_reason": delta.stop_reason,
            **extras(self._body, [delta]),
        }
        yield self._chunks.delta(entry, totals, totals.usage())

    def last(self, totals: Totals) -> Iterable[bytes]:
        return self._chunks.last(totals, totals.usage())

    def failed(self, problem: Problem) -> Iterable[bytes]:
        return self._chunks.failed(problem)

    # ---- whole -------------------------------------------------------------------------------------

    def whole(self, totals: Totals) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.text)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                message |= {"content": text or None, "tool_calls": [_call(call) for call in choice.calls]}
            last = choice.deltas[-1]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice.deltas),
                    "finish_reason": choice.finish_reason(last),
                    "stop_reason": last.stop_reason,
                    **extras(self._body, choice.deltas),
                }
            )
        more = {"prompt_token_ids": self._order.prompt_token_ids} if self._body.return_token_ids else {}
        return {**self._common, "choices": choices, "usage": totals.usage(), "metrics": totals.metrics(), **more}

    def _logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        entries = [scored for delta in deltas for scored in delta.logprobs or ()]
        return {"content": chat_logprobs(entries, self._service.token_texts), "refusal": None}


def _call_deltas(pieces: Sequence[CallPiece], number: int) -> Iterator[dict[str, Any]]:
    """Yields one entry for each call, since clients merge the entries of different chunks but not those of one.
    `number` is the number of calls before these pieces."""
    entry: dict[str, Any] | None = None
    for piece in pieces:
        if piece.name is not None or entry is None:
            if entry is not None:
                yield entry
            number += piece.name is not None
            entry = {"index": number - 1, "function": {"arguments": piece.arguments}}
            if piece.name is not None:
                entry |= {"id": piece.id, "type": "function"}
                entry["function"] = {"name": piece.name, "arguments": piece.arguments}
        else:
            entry["function"]["arguments"] += piece.arguments
    if entry is not None:
        yield entry


def _call(call: ParsedCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
