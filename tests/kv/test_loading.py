"""What a sequence holds once its loads have ended: quick, and the same as the plain rules say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from outrider.kv import Full, GroupKind, Interval, Sliding
from outrider.kv.intervals import covered, subtract, union
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


@given(parts=st.lists(intervals, max_size=8), end=st.integers(0, 60))
def test_the_run_before_an_end_is_the_one_that_walking_down_finds(parts: list[Interval], end: int) -> None:
    assert run_start(parts, end) == plain_run_start(parts, end)


@given(whole=intervals, parts=st.lists(intervals, max_size=8))
def test_union_and_difference_are_those_of_sets(whole: Interval, parts: list[Interval]) -> None:
    rest = subtract(whole, parts)
    assert positions(rest) == positions([whole]) - positions(parts)
    assert covered(whole, parts) == (not rest)
    runs = union(parts)
    assert positions(runs) == positions(parts)
    for pieces in (rest, runs):
        assert not any(piece.empty for piece in pieces)
        assert all(left.end <= right.start for left, right in pairwise(pieces))


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


class Counting(Sliding):
    """Counts how often it is asked."""

    asked = 0

    def needed(self, end: int, margin: int = 0) -> Interval:
        Counting.asked += 1
        return super().needed(end, margin)


def test_settling_many_loads_asks_once_or_twice_for_each() -> None:
    """A long sequence, each page loaded on its own, every other one failed: never end by end, nor pair by pair."""
    pages = 4000
    loads = Loads()
    for number in range(pages):
        load = Load(0, Interval(16 * number, 16 * number + 16), b"key")
        loads[load] = LoadState.PENDING
        loads[load] = LoadState.FAILED if number % 2 else LoadState.ARRIVED
        assert not loads.num_pending
    parts = loaded_parts(loads, 0, Interval(0, 16 * pages))
    assert first_failure(loads, range(1), 16 * pages) == 16
    assert longest_held([Full()], [parts], 16 * pages) == 16
    assert longest_held([Sliding(16)], [parts], 16 * pages) == 16 * (pages - 1)
    assert run_start(parts, 16 * (pages - 1)) == 16 * (pages - 2)
    Counting.asked = 0
    assert longest_held([Counting(18)], [parts], 16 * pages) == 16  # every run is too short, but for the first
    assert Counting.asked <= 2 * pages
