"""The `SamplingParams` of a request, within the server's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import RequestError
from outrider.grammar import Grammar
from outrider.sampling import SamplingParams
from outrider.server.config import ServerConfig
from outrider.server.front.problems import Problem
from outrider.server.messages import Facts
from outrider.server.protocol.fields import GenerationFields

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
OTHER_FIELDS = ("seed", "stop", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens")
IDS_MAX = 4096


def sampling_params(
    body: GenerationFields,
    config: ServerConfig,
    facts: Facts,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    check_limits(body, config, logprobs)
    if grammar is not None and not facts.supports_grammars:
        raise Problem(
            f"structured output ({grammar.kind.value}) is not available on this server; leave it out and check the "
            "text yourself",
            code="not_available",
        )
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    # Recommended settings belong together: a request with its own temperature does not want the rest of them.
    recommended: Mapping[str, Any] = {} if body.temperature is not None else facts.sampling_defaults
    values = dict(recommended) | {name: value for name, value in given.items() if value is not None}
    if "top_k" in values:
        # A larger number keeps all tokens.
        values["top_k"] = min(int(values["top_k"]), facts.vocab_size)
    values |= {name: getattr(body, name) for name in OTHER_FIELDS}
    try:
        params = SamplingParams(
            **values,
            n=1 if body.n is None else body.n,
            stop_token_ids=body.stop_token_ids,
            allowed_token_ids=body.allowed_token_ids,
            logit_bias=_logit_bias(body.logit_bias),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )
        params.check_vocabulary(facts.vocab_size)
    except RequestError as error:
        raise Problem(str(error), param=_field_in(str(error), body)) from None
    return params


def check_limits(body: GenerationFields, config: ServerConfig, logprobs: int | None) -> None:
    if body.n is not None and body.n > config.n_max:
        raise Problem(f"n may be at most {config.n_max}, got {body.n}; send several requests", param="n")
    if logprobs is not None and logprobs > config.logprobs_max:
        field = "logprobs" if getattr(body, "top_logprobs", None) is None else "top_logprobs"
        raise Problem(f"{field}: at most {config.logprobs_max} a token, got {logprobs}", param=field)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > config.stop_strings_max:
        raise Problem(f"at most {config.stop_strings_max} stop strings, got {len(stop)}", param="stop")
    if any(len(string) > config.stop_characters_max for string in stop):
        raise Problem(f"a stop string may have at most {config.stop_characters_max} characters", param="stop")
    for name, most in (
        ("logit_bias", config.logit_bias_max),
        ("stop_token_ids", IDS_MAX),
        ("allowed_token_ids", IDS_MAX),
    ):
        if len(getattr(body, name) or ()) > most:
            raise Problem(f"{name} may name at most {most} tokens", param=name)


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    bias = {}
    for name, value in given.items():
        if not name.isascii() or not name.isdigit() or len(name) > 10:
            raise Problem(f"logit_bias: {name[:40]!r} is not a token id", param="logit_bias")
        bias[int(name)] = value
    return bias


def _field_in(message: str, body: GenerationFields) -> str | None:
    """Returns the field that a message is about; messages about a setting begin with its name."""
    word = message.split(maxsplit=1)[0].rstrip(":")
    return word if word in type(body).model_fields else None
