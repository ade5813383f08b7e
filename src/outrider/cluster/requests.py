"""What Dynamo's front end asks of a worker, as our settings. What cannot be done is refused by name.

Stop strings stay with the front end, which has the text: it ends the stream there, and the worker is told to abort.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.sampling import SamplingParams

Fields = Mapping[str, Any]
GRAMMARS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.EBNF,
}
SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
UNSUPPORTED = {
    "multi_modal_data": "images, audio and video",
    "prompt_embeds": "prompts as embeddings",
    "encoder_result": "encoder workers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A request, as the engine takes it."""

    prompt: list[int]
    params: SamplingParams
    salt: str
    ticket: str | None
    """What leads to the KV that a prefill worker holds for this request."""


def read_order(request: Fields, *, name: str, defaults: Mapping[str, float]) -> Order:
    """Translate a request, or refuse it. `name` is its id in the cluster; `defaults` are the model's own settings."""
    for field, what in UNSUPPORTED.items():
        if request.get(field):
            raise RequestError(f"{what} are not supported here; send text only")
    routing = request.get("routing") or {}
    if routing.get("lora_name"):
        raise RequestError(f"there is no adapter {routing['lora_name']!r} here; ask for the model itself")
    return Order(
        prompt=list(request["token_ids"]),
        params=_params(request, name=name, defaults=defaults),
        salt=routing.get("cache_salt") or "",
        ticket=_ticket(request),
    )


def _params(request: Fields, *, name: str, defaults: Mapping[str, float]) -> SamplingParams:
    sampling = request.get("sampling_options") or {}
    stops = request.get("stop_conditions") or {}
    wanted = request.get("output_options") or {}
    if sampling.get("use_beam_search"):
        raise RequestError("beam search is not available; leave use_beam_search out")
    if (sampling.get("n") or 1) > 1:
        raise RequestError(
            "n must be 1: the front end ends an answer with the first of its texts that ends; send n requests instead, "
            "each with a seed of its own"
        )
    if (sampling.get("best_of") or 1) > (sampling.get("n") or 1):
        raise RequestError("best_of larger than n is not available; leave it out")
    if wanted.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs are not available behind the front end; ask a server of one engine")
    given: dict[str, Any] = dict(defaults)
    given |= {field: sampling[field] for field in SAMPLING if sampling.get(field) is not None}
    given |= {field: stops[field] for field in ("min_tokens", "ignore_eos") if stops.get(field) is not None}
    given["max_tokens"] = stops.get("max_tokens")
    ids = [*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())]
    # Those that are hidden end a text, unless the client asked that nothing does.
    given["stop_token_ids"] = list(stops.get("stop_token_ids") or ()) if stops.get("ignore_eos") else ids
    if wanted.get("logprobs") is not None:
        given["logprobs"] = wanted["logprobs"]
    # A worker that continues this request elsewhere must draw the same tokens.
    given.setdefault("seed", seed_of(name))
    given["grammar"] = _grammar(sampling.get("guided_decoding") or {})
    return SamplingParams(**given)


def seed_of(name: str) -> int:
    """Returns the seed of a request that came without one: the same on every worker that it visits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def _grammar(guided: Fields) -> Grammar | None:
    for field in ("structural_tag", "whitespace_pattern"):
        if guided.get(field) is not None:
            raise RequestError(f"guided_decoding: {field} is not available; give a JSON schema, a regex or a grammar")
    kinds = [field for field in GRAMMARS if guided.get(field) is not None]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise RequestError(f"guided_decoding: {' and '.join(kinds)} are given; give one of them")
    value = guided[kinds[0]]
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if kinds[0] == "json" and value in ({"type": "object"}, "json_object"):
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    return Grammar(kind=GRAMMARS[kinds[0]], text=text)


def _ticket(request: Fields) -> str | None:
    """Returns what the prefill worker gave the front end for the decode worker."""
    result = request.get("prefill_result") or {}
    carried = result.get("disaggregated_params") or {}
    ticket = carried.get("ticket")
    if ticket is not None and not isinstance(ticket, str):
        raise RequestError("the ticket of a prefill worker must be text")
    return ticket


def inexact_after_migration(params: SamplingParams) -> list[str]:
    """Returns the settings of a request that another worker could not carry on with, since it would have to know which
    part of its prompt was generated."""
    found = [name for name in ("presence_penalty", "frequency_penalty") if getattr(params, name)]
    if params.min_tokens > 1:
        found.append("min_tokens")
    if params.grammar is not None:
        found.append("structured output")
    return found
