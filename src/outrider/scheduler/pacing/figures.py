"""What a pacer says about its choices, for metrics and for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.scheduler.pacing.worth import Source

SOURCES = tuple(source.name.lower() for source in Source)
"""Names of the sources of drafts, in the order of the counts by source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is chosen, and why, for people."""

    rate: float
    """Tokens per second that are expected of the drafter's requests and all others together."""
    plain_rate: float
    """Tokens per second that are expected without drafts."""
    observed_rate: float
    """Tokens per second of the last steps without prompts; 0 before the first."""
    drafting_requests: int
    """Number of requests for which the drafter proposes."""
    drafts: int
    """Most tokens that it proposes for each of them."""
    least_probability: float
    """Least joint probability with which a draft is worth going on from."""
    row_price: float
    """Tokens that the time of one more row of the target is worth."""
    speed: float
    """Factor of all times: above 1 where the machine is slower than when the costs were learnt."""


@dataclass(slots=True)
class PacingCounts:
    """What was chosen, for metrics."""

    drafting_steps: int = 0
    plain_steps: int = 0
    probes: int = 0
    """Proposals that were not expected to pay."""
    pauses: int = 0
    """Steps without drafts among steps with drafts, to find out what they take."""
    offered_by_source: list[int] = field(default_factory=lambda: [0] * len(Source))
    """Drafts that were proposed, by Source."""
    verified_by_source: list[int] = field(default_factory=lambda: [0] * len(Source))
    accepted_by_source: list[int] = field(default_factory=lambda: [0] * len(Source))
