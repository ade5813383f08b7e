"""What a sequence holds once its loads have ended: quick, and the same as the plain rules say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.kv import Full, GroupKind, Interval, Sliding
from outrider.kv.ledger import Load, Loads, LoadState
from outrider.kv.loading import first_failure, loaded_parts, longest_held, run_start

intervals = st.builds(lambda start, size: Interval(start, start + size), st.integers(0, 40), st.integers(-3, 12))
kinds = st.just(Full()) | st.builds(Sliding, st.integers(1, 20))


def positions(parts: Sequence[Interval]) -> set[int]:
    return {position for part in parts for position in range(part.start, part.end)}


def plain_longest_held(groups: Sequence[tuple[GroupKind, list[Interval]]], limit: int) -> int:
    held = [(kind, positions(parts)) for kind, parts in groups]
    for end in range(limit, 0, -1):
        if all(positions([kind.needed(end)]) <= here for kind, here in held):
            return end
    return 0


def plain_run_start(parts: Sequence[Interval], end: int) -> int:
    here = positions(parts)
    while end - 1 in here:
        end -= 1
    return end


@given(groups=st.lists(st.tuples(kinds, st.lists(intervals, max_size=6)), max_size=3), limit=st.integers(0, 60))
def test_the_longest_end_is_the_one_that_trying_every_end_finds(
    groups: list[tuple[GroupKind, list[Interval]]], limit: int
) -> None:
    found = longest_held([kind for kind, _ in groups], [parts for _, parts in groups], limit)
    assert found == plain_longest_held(groups, limit)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_an_end_needs_every_position_of_its_window(window: int) -> None:
    """All sets of up to eight positions, held one by one."""
    for held in range(1 << 8):
        parts = [Interval(position, position + 1) for position in range(8) if held >> position & 1]
        group = (Sliding(window), parts)
        assert longest_held([group[0]], [parts], 8) == plain_longest_held([group], 8)


@given(parts=st.lists(intervals, max_size=8), end=st.integers(0, 60))
def test_the_run_before_an_end_is_the_one_that_walking_down_finds(parts: list[Interval], end: int) -> None:
    assert run_start(parts, end) == plain_run_start(parts, end)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([*LoadState, None])),
        max_size=40,
    )
)
def test_pending_loads_are_counted_as_they_come_and_go(changes: list[tuple[int, LoadState | None]]) -> None:
    loads, plain = Loads(), dict[Load, LoadState]()
    for number, state in changes:
        load = Load(number, Interval(number, number + 1), None)
        for table in (loads, plain):
            if state is not None:
                table[load] = state
            else:
                table.pop(load, None)
        assert loads.num_pending == sum(state is LoadState.PENDING for state in plain.values())
        assert dict(loads) == plain
        assert bool(loads) == bool(plain)
    loads.clear()
    assert (loads.num_pending, len(loads)) == (0, 0)


def lines_run(work: Callable[[], None]) -> int:
    """How many lines of Python it takes: the same on any machine, however busy."""
    count = 0

    def line(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def settle(pages: int) -> int:
    """The cost of settling a sequence of so many pages, each loaded on its own, of which every other one failed."""
    loads = Loads()
    for number in range(pages):
        load = Load(0, Interval(16 * number, 16 * number + 16), b"key")
        loads[load] = LoadState.PENDING
        loads[load] = LoadState.FAILED if number % 2 else LoadState.ARRIVED
        assert not loads.num_pending

    def work() -> None:
        parts = loaded_parts(loads, 0, Interval(0, 16 * pages))
        limit = first_failure(loads, range(1), 16 * pages)
        assert longest_held([Full()], [parts], 16 * pages) == limit == 16
        assert longest_held([Sliding(16)], [parts], 16 * pages) == 16 * (pages - 1)
        assert run_start(parts, 16 * (pages - 1)) == 16 * (pages - 2)

    return lines_run(work)


def test_settling_many_loads_costs_in_proportion() -> None:
    assert settle(1600) < 5 * settle(400)  # four times as many; the square would be 16
