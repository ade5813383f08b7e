"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outrider.engine.speculation import SpeculationCounts
from outrider.runner.sampler import TokenLogprobs

__all__ = ["CompletionOutput", "Origin", "RequestMetrics", "RequestOutput", "SpeculationCounts"]


class Origin(Enum):
    """Where a token came from."""

    PLAIN = "plain"
    """Sampled by the target, with no draft to check."""
    ACCEPTED = "accepted"
    """A draft that the target agreed with."""
    CORRECTED = "corrected"
    """The target's own, in place of a draft it disagreed with."""
    BONUS = "bonus"
    """The target's own, after all drafts were accepted."""


@dataclass(slots=True)
class CompletionOutput:
    """One continuation so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    """One for each token id."""
    pieces: list[str] = field(default_factory=list)
    """The text that each token added; together they begin with `text`, which leaves out stop strings."""
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """stop, length, abort or error; None while it goes on."""
    stop_reason: int | str | None = None
    """The token id or the string that stopped it; None at end-of-text and at a limit."""


@dataclass(slots=True)
class RequestMetrics:
    arrival_s: float
    scheduled_s: float | None = None
    """When its first rows were planned."""
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    steps: int = 0
    """Target passes that sampled for this request."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token; nothing precedes the first, so its entry is None."""
    finished: bool = False
    error: str | None = None
    """Why it ended, where finish_reason is error."""
