"""Totals over all engine processes of this server, which survive the restart of a process."""

from __future__ import annotations

from collections.abc import Callable

from outrider.server.messages import Counters, Delta, Ending, StepReport, TierFigures

STATES = frozenset(
    {"running", "waiting", "kv_usage", "choice", "lookup_tokens", "lookup_memory_bytes", "held_pages", "leases"}
)
"""Counters that describe the present state, and are not added up."""


class Figures:
    def __init__(self) -> None:
        self._before = Counters()
        self._now = Counters()
        self.restarts = 0
        self.on_gap: Callable[[float], None] = lambda gap_s: None
        self.on_abort: Callable[[int], None] = lambda count: None
        self.on_ending: Callable[[Delta, Ending], None] = lambda delta, ending: None

    def take(self, report: StepReport) -> None:
        aborted = report.counters.aborted - self._now.aborted
        self._now = report.counters
        if aborted:
            self.on_abort(aborted)
        for gap_s in report.gaps_s:
            self.on_gap(gap_s)
        for delta in report.deltas:
            if delta.ending is not None:
                self.on_ending(delta, delta.ending)

    def engine_ended(self) -> None:
        self._before, self._now = self.totals, Counters()
        self.restarts += 1

    @property
    def prompts_held(self) -> int:
        """Number of prompts whose KV is held for decode workers now."""
        return self._now.leases

    @property
    def totals(self) -> Counters:
        return added(self._before, self._now)


def added(one: Counters, other: Counters) -> Counters:
    values = {}
    for name in Counters.__struct_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if name in STATES:
            values[name] = right
        elif isinstance(right, dict):
            values[name] = {tier: _added_tiers(left.get(tier), right.get(tier)) for tier in {**left, **right}}
        elif isinstance(right, list):
            long, short = sorted((left, right), key=len, reverse=True)
            values[name] = [number + (short[i] if i < len(short) else 0) for i, number in enumerate(long)]
        else:
            values[name] = left + right
    return Counters(**values)


def _added_tiers(one: TierFigures | None, other: TierFigures | None) -> TierFigures:
    left, right = one or TierFigures(), other or TierFigures()
    names = TierFigures.__struct_fields__
    return TierFigures(**{name: getattr(left, name) + getattr(right, name) for name in names})
