"""Intervals against sets of positions, and the pairing of pages against a map of single slots."""

from __future__ import annotations

from random import Random

import pytest

from outrider.kv.intervals import (
    NOTHING,
    Interval,
    SlotRun,
    covered,
    intersect,
    page_count,
    pages_under,
    pair,
    subtract,
)


def random_interval(rng: Random, top: int = 40) -> Interval:
    """Sometimes empty, sometimes inside out."""
    return Interval(rng.randint(0, top), rng.randint(0, top))


def positions(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.end))


@pytest.mark.parametrize("seed", range(5))
def test_interval_arithmetic_equals_sets_of_positions(seed: int) -> None:
    rng = Random(seed)
    for _ in range(300):
        whole, other = random_interval(rng), random_interval(rng)
        parts = [random_interval(rng) for _ in range(rng.randint(0, 5))]
        union = set().union(*map(positions, parts))
        assert whole.size == len(positions(whole))
        assert whole.empty == (not positions(whole))
        assert whole.covers(other) == (positions(other) <= positions(whole))
        assert positions(intersect(whole, other)) == positions(whole) & positions(other)
        assert covered(whole, parts) == (positions(whole) <= union)
        left = subtract(whole, parts)
        assert [p for piece in left for p in range(*piece)] == sorted(positions(whole) - union)
        assert not any(piece.empty for piece in left)


@pytest.mark.parametrize("page_tokens", [1, 2, 3, 8, 16])
def test_pages_under_are_exactly_the_pages_of_its_positions(page_tokens: int) -> None:
    for start in range(20):
        for end in range(40):
            touched = {p // page_tokens for p in range(start, end)}
            assert set(pages_under(Interval(start, end), page_tokens)) == touched
    for end in range(40):
        assert page_count(end, page_tokens) == len({p // page_tokens for p in range(end)})


def test_no_overlap_is_nothing() -> None:
    assert intersect(Interval(0, 4), Interval(4, 8)) == NOTHING
    assert intersect(Interval(9, 3), Interval(0, 20)) == NOTHING
    assert list(_paired(Interval(0, 4), Interval(4, 8), 4, 4)) == []


def _paired(wanted: Interval, source: Interval, source_page_tokens: int, destination_page_tokens: int):
    return pair(
        wanted,
        source=source,
        source_pages=range(100, 200),
        source_page_tokens=source_page_tokens,
        destination_pages=range(500, 600),
        destination_page_tokens=destination_page_tokens,
    )


def test_pairing_of_the_drawn_example() -> None:
    runs = list(_paired(Interval(4, 12), Interval(0, 16), 8, 4))
    assert runs == [SlotRun(100, 4, 501, 0, 4, 4), SlotRun(101, 0, 502, 0, 4, 8)]


@pytest.mark.parametrize("seed", range(10))
def test_pairing_moves_every_wanted_slot_to_its_own_place_and_no_other(seed: int) -> None:
    """Unequal page sizes, and a surplus of pages or positions at either end of either side."""
    rng = Random(seed)
    for _ in range(100):
        source_size, destination_size = rng.randint(1, 9), rng.randint(1, 9)
        wanted, source = random_interval(rng), random_interval(rng)
        surplus = rng.randint(0, 3)
        source_pages = rng.sample(range(1, 500), page_count(40, source_size) + surplus)
        destination_pages = rng.sample(range(1, 500), page_count(40, destination_size) + 3 - surplus)
        runs = list(
            pair(
                wanted,
                source=source,
                source_pages=source_pages,
                source_page_tokens=source_size,
                destination_pages=destination_pages,
                destination_page_tokens=destination_size,
            )
        )
        moved = [
            (run.start + i, run.source_page, run.source_offset + i, run.destination_page, run.destination_offset + i)
            for run in runs
            for i in range(run.slots)
        ]
        assert moved == [
            (
                p,
                source_pages[p // source_size],
                p % source_size,
                destination_pages[p // destination_size],
                p % destination_size,
            )
            for p in sorted(positions(wanted) & positions(source))
        ]
        for run in runs:
            assert run.source_offset + run.slots <= source_size
            assert run.destination_offset + run.slots <= destination_size


def test_pairing_makes_as_few_copies_as_the_pages_allow() -> None:
    runs = list(_paired(Interval(3, 45), Interval(0, 64), 16, 16))
    assert [run.slots for run in runs] == [13, 16, 13]
    runs = list(_paired(Interval(0, 24), Interval(0, 24), 12, 8))
    assert [run.slots for run in runs] == [8, 4, 4, 8]


@pytest.mark.parametrize("surplus", [0, 1, 5])
def test_surplus_at_the_end_of_the_source_shifts_nothing(surplus: int) -> None:
    """The source also holds pages past what is wanted (its own lookahead)."""
    for wanted_end in (15, 16, 17):
        runs = list(_paired(Interval(0, wanted_end), Interval(0, wanted_end + surplus), 16, 16))
        assert [(run.source_page, run.destination_page) for run in runs] == [
            (100 + n, 500 + n) for n in range(page_count(wanted_end, 16))
        ]


def test_surplus_at_the_front_of_either_side_shifts_nothing() -> None:
    """The destination already holds a prefix; the source has lost one (its window moved on)."""
    held_by_destination = list(_paired(Interval(32, 48), Interval(0, 48), 16, 16))
    assert held_by_destination == [SlotRun(102, 0, 502, 0, 16, 32)]
    lost_by_source = list(_paired(Interval(0, 48), Interval(20, 48), 16, 16))
    assert lost_by_source == [SlotRun(101, 4, 501, 4, 12, 20), SlotRun(102, 0, 502, 0, 16, 32)]
