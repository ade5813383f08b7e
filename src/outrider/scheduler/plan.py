"""The messages of a step: what to run (StepPlan), and what came of it (Verdict). Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.kv.plan import KVPlan
from outrider.scheduler.pacing.pacer import Pace
from outrider.scheduler.pacing.worth import Proposed


class ScheduledRequest(NamedTuple):
    """The rows of one request in one step.

        tap rows   [first_position, start)           run again for their taps; K/V goes to the null page
        rows       [start, end)                      the last `drafts` of them, [known, end), verify drafts
        feed       [draft_end (and what was kept), durable_end(v) or feed_to)
        propose    `propose` drafts from v

    With `samples` > 0 the target's distribution is sampled at the last known token and at each draft; with
    more than one, the last prompt row is sampled once for each fork.
    """

    sequence_id: str
    epoch: int
    start: int
    num_rows: int
    drafts: int
    tap_rows: int
    propose: int
    samples: int
    draft_end: int
    """Where the draft groups' durable slots end before the step; -1 without draft groups."""
    proposed: int
    """How many drafts the last proposal wrote scratch for."""
    feed_to: int | None
    """Where feeding stops in this step while a drafter catches up; None if the drafter keeps up."""

    @property
    def first_position(self) -> int:
        """Position of the first row that runs, which is a tap row if there are any."""
        return self.start - self.tap_rows

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows

    @property
    def known(self) -> int:
        """Position after the last row whose token is committed; the rows from here on verify drafts."""
        return self.start + self.num_rows - self.drafts

    @property
    def feeds(self) -> bool:
        """Whether the drafter must be fed: at every step of a request that has draft groups, whatever k is."""
        return self.draft_end >= 0

    @property
    def kept_from(self) -> int:
        """The first position whose K/V is kept; tap rows come before it and write to the null page."""
        return self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    step: int
    scheduled: tuple[ScheduledRequest, ...]
    kv: KVPlan
    pace: Pace | None = None
    """On what terms requests are drafted for; None if the number of drafts is fixed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a step decided, for each of its scheduled requests in order.

    The accept rule: drafts are accepted while they equal what the target sampled at their position; the
    first sample that differs, or the one after the last draft, is kept as well. So a request that samples
    gains accepted + 1 tokens, in order.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    proposed: tuple[int, ...]
    """Number of drafts that wait for verification. Without a pace it is at most ScheduledRequest.propose."""
    proposals: Mapping[str, Proposed] = field(default_factory=dict)
    """By sequence id, where a pace asks for it: how likely the drafts are to be accepted."""
    fork_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By sequence id, for a request that samples several continuations: the first token of each fork."""


class Update(NamedTuple):
    """What one sequence gained in a step."""

    sequence_id: str
    tokens: tuple[int, ...]
    finish: str | None
    """stop, length, prefilled or failed; None while the sequence goes on."""
