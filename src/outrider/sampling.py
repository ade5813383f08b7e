"""How the tokens of a request are chosen: `SamplingParams`, with vLLM's names and defaults. Torch-free."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from outrider.errors import RequestError
from outrider.grammar import Grammar
from outrider.kv.checked import checked_fields, whole_number
from outrider.scheduler.request import MAX_TOKEN_ID, MOST_FORKS

MAX_LOGPROBS = 20
"""Most alternatives per token: each costs time and memory at every token."""
MAX_LOGIT_BIAS = 100.0
GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: dividing by them would only turn rounding errors into choices."""
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 63) - 1


@checked_fields(RequestError)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings of one request, checked when they are made. Sequences become tuples, and numbers floats where a float
    is meant."""

    n: int = 1
    """Number of independent continuations; the first is what n = 1 would give for the same seed."""
    temperature: float = 1.0
    """0 (or anything below 1e-5) always chooses the most likely token."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the output less likely."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; from -100 to 100."""
    seed: int | None = None
    """Equal seed, prompt and settings give equal text. None draws a new seed for each request."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    """Neither end-of-text nor stop_token_ids can be chosen before this many tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; None for as many as the context allows."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities to return beside the chosen token's; None returns none."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that can be chosen."""
    grammar: Grammar | None = None
    """The form that the output must have; None for any."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar, got {type(self.grammar).__name__}")
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids or (), "stop_token_ids"))
        if self.allowed_token_ids is not None:
            allowed = _token_ids(self.allowed_token_ids, "allowed_token_ids")
            if not allowed:
                raise RequestError("allowed_token_ids is empty: no token could be chosen; leave it out to allow all")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))

    def _check_numbers(self) -> None:
        whole_number(self.n, "n", at_least=1, error=RequestError)
        if self.n > MOST_FORKS:
            raise RequestError(f"n may be at most {MOST_FORKS}, got {self.n}; send several requests")
        for name, low, high, advice in (
            ("temperature", 0.0, math.inf, "0 always takes the most likely token"),
            ("top_p", 0.0, 1.0, "1 keeps all tokens"),
            ("min_p", 0.0, 1.0, "0 turns it off"),
            ("repetition_penalty", 0.0, math.inf, "1 turns it off"),
            ("presence_penalty", -2.0, 2.0, "0 turns it off"),
            ("frequency_penalty", -2.0, 2.0, "0 turns it off"),
        ):
            above = name in ("top_p", "repetition_penalty")
            self._set(name, _number(getattr(self, name), name, low, high, advice, above=above))
        whole_number(self.top_k, "top_k", at_least=-1, advice="0 keeps all tokens", error=RequestError)
        self._set("top_k", max(self.top_k, 0))
        if self.seed is not None:
            whole_number(self.seed, "seed", at_least=SEED_MIN, advice="leave it out for any", error=RequestError)
            if self.seed > SEED_MAX:
                raise RequestError(f"seed must fit into 64 bits (at most {SEED_MAX}), got {self.seed}")

    def _check_lengths(self) -> None:
        whole_number(self.min_tokens, "min_tokens", at_least=0, error=RequestError)
        if self.max_tokens is not None:
            advice = "leave it None for as many as fit"
            whole_number(self.max_tokens, "max_tokens", at_least=1, advice=advice, error=RequestError)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens}); "
                    "lower the one or raise the other"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is None:
                continue
            advice = f"from 0 (only the token itself) to {MAX_LOGPROBS}"
            whole_number(count, name, at_least=0, advice=advice, error=RequestError)
            if count > MAX_LOGPROBS:
                raise RequestError(f"{name} may be at most {MAX_LOGPROBS}, got {count}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return cast("tuple[int, ...]", self.stop_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have. Called where the model is known."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            ids: Iterable[int] = getattr(self, name) or ()
            largest = max(ids, default=0)
            if largest >= vocab_size:
                raise RequestError(
                    f"{name}: token id {largest} is outside this model's vocabulary; ids go from 0 to {vocab_size - 1}"
                )


def _number(value: object, name: str, low: float, high: float, advice: str, *, above: bool) -> float:
    """Returns a finite number in [low, high], or in (low, high] if `above`; refuses anything else."""
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    inside = low < number <= high if above else low <= number <= high
    if not inside or not math.isfinite(number):
        least = f"more than {low:g}" if above else f"at least {low:g}"
        most = "finite" if math.isinf(high) else f"at most {high:g}"
        raise RequestError(f"{name} must be a number, {least} and {most}, got {reprlib.repr(value)}; {advice}")
    return number


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings: tuple[object, ...] | None = None
    if isinstance(stop, str):
        strings = (stop,)
    elif isinstance(stop, Sequence) and not isinstance(stop, bytes | bytearray):
        strings = tuple(stop)
    if strings is None or not all(isinstance(string, str) for string in strings):
        raise RequestError(f"stop must be a string or a list of strings, got {reprlib.repr(stop)}")
    if "" in strings:
        raise RequestError("stop holds an empty string, which would stop at once; leave it out")
    return tuple(dict.fromkeys(cast("tuple[str, ...]", strings)))


def _token_ids(ids: object, name: str) -> tuple[int, ...]:
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} must be a list of token ids, got {reprlib.repr(ids)}")
    return tuple(dict.fromkeys(_token_id(item, name) for item in ids))


def _token_id(item: object, name: str) -> int:
    if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= MAX_TOKEN_ID:
        raise RequestError(f"{name}: a token id is a whole number from 0 to {MAX_TOKEN_ID}, got {reprlib.repr(item)}")
    return item


def _logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {reprlib.repr(bias)}")
    return {
        _token_id(item, "logit_bias"): _number(
            value,
            f"logit_bias of token {item}",
            -MAX_LOGIT_BIAS,
            MAX_LOGIT_BIAS,
            "allowed_token_ids forbids or forces tokens for certain",
            above=False,
        )
        for item, value in bias.items()
    }
