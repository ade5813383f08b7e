"""Arithmetic of loads: what a sequence must be sent, and where it may start once loads came or failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outrider.kv.groups import GroupKind
from outrider.kv.intervals import NOTHING, Interval, covered, subtract
from outrider.kv.ledger import Load, LoadState


def wanted(kind: GroupKind, *, end: int, margin: int, held: Interval, offered: Interval) -> Interval | None:
    """What a peer must send so that work may go on at `end`: the need minus what is held, as far as offered.

        full      held [0 ------ h)            wanted           [h ----- end)
        sliding   held    [-- h)               wanted                 [------ end)

    The margin is taken where it is offered. None if the offer does not cover what is needed without it.
    """
    needed = kind.needed(end, margin)
    if held.covers(kind.needed(end)):
        return Interval(end, end)
    have = NOTHING if held.empty else held
    want = Interval(max(needed.start, have.end, offered.start), min(end, offered.end))
    return want if covered(kind.needed(end), [want, have]) else None


def loaded_parts(loads: Mapping[Load, LoadState], group: int, cached: Interval) -> list[Interval]:
    """What is held of a group once its loads have ended: the hit without failed pages, and what arrived."""
    mine = [(load.interval, state) for load, state in loads.items() if load.group == group]
    failed = [interval for interval, state in mine if state is LoadState.FAILED]
    arrived = [interval for interval, state in mine if state is LoadState.ARRIVED]
    return [*subtract(cached, failed), *arrived]


def first_failure(loads: Mapping[Load, LoadState], groups: Iterable[int], otherwise: int) -> int:
    """The first position that did not arrive in any of the groups."""
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
    """The largest end <= limit at which every group holds what it needs."""
    return next(
        end
        for end in range(limit, -1, -1)
        if all(covered(kind.needed(end), parts) for kind, parts in zip(kinds, held, strict=True))
    )


def run_start(parts: Sequence[Interval], end: int) -> int:
    """Where the run of held positions that ends at `end` starts."""
    start = end
    moved = True
    while moved:
        moved = False
        for part in parts:
            if part.start < start <= part.end:
                start, moved = part.start, True
    return start
