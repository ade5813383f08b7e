"""The messages of a step: what to run (StepPlan), and what came of it (Verdict). Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.kv.plan import KVPlan


class StepRow(NamedTuple):
    """The rows of one request in one step.

        tap rows   [start - tap_rows, start)         run again for their taps; K/V goes to the sink
        rows       [start, start + num_rows)            the last `drafts` of them verify drafts
        feed       [draft_end (and what was kept), durable_end(v) or feed_to)
        propose    `propose` drafts from v

    With `samples` > 0 the target's distribution is sampled at the last known token and at each draft; with
    more than one, the last prompt row is sampled once for each fork.
    """

    request: str
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
    """Feeding stops here while a drafter catches up; None: it keeps up."""

    @property
    def feeds(self) -> bool:
        """Does the drafter have to be fed? At every step of a request that has draft groups, whatever k is."""
        return self.draft_end >= 0

    @property
    def kept_from(self) -> int:
        """The first position whose K/V is kept; tap rows come before it and write to the sink."""
        return self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[StepRow, ...]
    kv: KVPlan

    @property
    def empty(self) -> bool:
        return not (self.rows or self.kv.copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a step decided, row by row.

    The accept rule: drafts are accepted while they equal what the target sampled at their position; the
    first sample that differs, or the one after the last draft, is kept as well. So a sampling row yields
    accepted + 1 tokens, in order.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    proposed: tuple[int, ...]
    """Drafts that were really proposed, at most StepRow.propose."""
    fork_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For a row with several samples: the first token of each further fork."""


class Update(NamedTuple):
    """What one request gained in a step."""

    request: str
    tokens: tuple[int, ...]
    finish: str | None
    """stop, length, prefilled, aborted or failed; None while it goes on."""
