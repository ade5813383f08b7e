"""Arithmetic of loads: what a sequence must be sent, and where it may start once loads came or failed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

from outrider.kv.groups import GroupKind
from outrider.kv.intervals import NOTHING, Interval, covered, subtract, union
from outrider.kv.ledger import Load, LoadState


def wanted(kind: GroupKind, *, end: int, margin: int, held: Interval, offered: Interval) -> Interval | None:
    """Returns what a peer must send so that work may go on at `end`: the need minus what is held, as far as offered.

        full      held [0 ------ h)            wanted           [h ----- end)
        sliding   held    [-- h)               wanted                 [------ end)

    The margin is taken where it is offered. Returns None if the offer does not cover what is needed without it.
    """
    needed = kind.needed(end, margin)
    if held.covers(kind.needed(end)):
        return Interval(end, end)
    have = NOTHING if held.empty else held
    want = Interval(max(needed.start, have.end, offered.start), min(end, offered.end))
    return want if covered(kind.needed(end), [want, have]) else None


def loaded_parts(loads: Mapping[Load, LoadState], group: int, cached: Interval) -> list[Interval]:
    """Returns what is held of a group once its loads have ended: the hit without failed pages, and what arrived."""
    mine = [(load.interval, state) for load, state in loads.items() if load.group == group]
    failed = [interval for interval, state in mine if state is LoadState.FAILED]
    arrived = [interval for interval, state in mine if state is LoadState.ARRIVED]
    return [*subtract(cached, failed), *arrived]


def first_failure(loads: Mapping[Load, LoadState], groups: Iterable[int], otherwise: int) -> int:
    """Returns the first position that failed to arrive in any of the groups."""
    wanted_groups = set(groups)
    return min(
        (
            load.interval.start
            for load, state in loads.items()
            if load.group in wanted_groups and state is LoadState.FAILED
        ),
        default=otherwise,
    )


def longest_held(kinds: Sequence[GroupKind], held: Sequence[Sequence[Interval]], limit: int) -> int:
    """Returns the largest end <= limit at which every group holds what it needs.

    Each group can only lower the end, so repeating until none does finds the largest common one.
    """
    runs = [union(parts) for parts in held]
    end, lowered = limit, True
    while lowered:
        lowered = False
        for kind, group_runs in zip(kinds, runs, strict=True):
            fits = _longest_in_runs(kind, group_runs, end)
            end, lowered = fits, lowered or fits < end
    return end


def _longest_in_runs(kind: GroupKind, runs: Sequence[Interval], end: int) -> int:
    """Returns the largest end, at most this one, whose needs lie in the runs.

    runs        [ r0 )     [ r1      )
    end                         ^ needs more than r1 has: so does every end in r1, whose needs start no later
                      ^ next: r1.start, and since nothing ends there, r0.end
    """
    place = bisect_right(runs, end, key=lambda run: run.start) - 1
    while end > 0:
        needed = kind.needed(end)
        if needed.empty:
            return end
        while place >= 0 and runs[place].start >= end:
            place -= 1
        if place < 0:
            return 0
        run = runs[place]
        if end > run.end:
            end = run.end
        elif run.start <= needed.start:
            return end
        else:
            end = run.start
    return 0


def run_start(parts: Iterable[Interval], end: int) -> int:
    """Returns the start of the run of held positions that ends at `end`."""
    runs = union(parts)
    place = bisect_left(runs, end, key=lambda run: run.start) - 1
    return runs[place].start if place >= 0 and end <= runs[place].end else end
