"""Intervals against sets of positions, and the pairing of pages against a map of single slots."""

from __future__ import annotations

from random import Random

import pytest

from outrider.kv.intervals import (
    Interval,
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
        # As few copies as the pages allow: each one but the first starts a page of either side.
        assert all(0 in (run.source_offset, run.destination_offset) for run in runs[1:])
        for run in runs:
            assert run.source_offset + run.slots <= source_size
            assert run.destination_offset + run.slots <= destination_size
