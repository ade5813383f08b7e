"""What a caller gets back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from outrider.engine.speculation import SpeculationCounts
from outrider.runner.sampler import TokenLogprobs

__all__ = [
    "CompletionOutput",
    "Origin",
    "RequestMetrics",
    "RequestOutput",
    "SpeculationCounts",
    "TransferCounters",
    "TransferTimes",
]


def _no_tokens() -> array[int]:
    return array("I")


class Origin(Enum):
    """Where a token came from."""

    PLAIN = "plain"
    """Sampled by the target, with no draft to check."""
    ACCEPTED = "accepted"
    """A draft that the target agreed with."""
    CORRECTED = "corrected"
    """The target's own token, in place of a draft it disagreed with."""
    BONUS = "bonus"
    """The target's own token, after all drafts were accepted."""


@dataclass(slots=True)
class CompletionOutput:
    """One continuation so far."""

    index: int
    text: str = ""
    tokens: array[int] = field(default_factory=_no_tokens, repr=False)
    """The sequence's own record of its tokens, prompt and all, which the scheduler keeps; empty before it starts."""
    prompt_len: int = 0
    origins: list[Origin] = field(default_factory=list)
    """Where each generated token came from."""
    pieces: list[str] = field(default_factory=list)
    """The text that each token added; joined, they begin with `text`, which leaves out stop strings."""
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """stop, length, abort or error; None while the continuation goes on."""
    stop_reason: int | str | None = None
    """The token id or the string that stopped it; None at end-of-text and at a limit."""

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.origins)

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, in a new list."""
        return self.token_ids_between(0, self.num_tokens)

    def token_ids_between(self, start: int, end: int) -> list[int]:
        """Returns generated tokens [start, end), without a copy of those before them."""
        return self.tokens[self.prompt_len + start : self.prompt_len + end].tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTimes:
    """What it took to move a prompt's KV from its prefill worker."""

    queued_s: float
    """From the prefill worker's offer until pages were free here and reading began."""
    read_s: float
    confirmed_s: float
    """From the last byte until the prefill worker had confirmed that all of it was in place."""
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCounters:
    """Totals of hand-offs since the engine started."""

    handed_over: int = 0
    hand_overs_refused: int = 0
    """Prompts that were handed over without KV, because too much was held for others already."""
    leases_expired: int = 0
    fetches: int = 0
    fetch_failures: int = 0
    """Requests whose KV did not come from their prefill worker, or not all of it."""
    draft_groups_missing: int = 0
    """Hand-offs without the drafter's KV, because the prefill worker runs another drafter or none."""
    queried_tokens: int = 0
    """Prompt tokens of requests with a ticket that the local cache did not hold."""
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    fences: int = 0
    """Prefill workers that were cut off because a read did not end."""
    recomputed_prompts: int = 0
    held_pages: int = 0
    """Pages that are held for decode workers now."""
    leases: int = 0
    """Prompts whose KV is held for decode workers now."""


@dataclass(slots=True)
class RequestMetrics:
    arrival_s: float
    scheduled_s: float | None = None
    """When the request's first rows were planned."""
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    """Number of prompt tokens that came from the prefix cache."""
    transferred_tokens: int = 0
    """Number of prompt tokens whose KV came from a prefill worker."""
    transfer: TransferTimes | None = None
    steps: int = 0
    """Number of target passes that sampled for this request."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    tokens: array[int] = field(default_factory=_no_tokens, repr=False)
    """The record that holds the prompt, which is the first continuation's."""
    prompt_len: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token; nothing precedes the first, so its entry is None."""
    finished: bool = False
    error: str | None = None
    """Why the request ended, where finish_reason is error."""
    error_is_callers: bool = False
    """Whether the request's own settings caused the error, so that sending it again cannot help."""
    error_code: str | None = None
    """A name for the error that programs can test for: kv_transfer_failed."""
    ticket: str | None = None
    """What a decode worker needs to take the request over, if it was handed over with its KV."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens, in a new list."""
        return self.tokens[: self.prompt_len].tolist()
