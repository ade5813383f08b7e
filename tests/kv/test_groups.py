"""Group kinds against brute force: what a hit needs, and how long it can be."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from outrider.kv import Full, GroupKind, Interval, Sliding
from outrider.kv.search import longest_common

WINDOWS = (1, 7, 8, 9, 31, 32, 33, 100)
PAGES = (1, 4, 8, 16)
KINDS: list[GroupKind] = [Full(), *map(Sliding, WINDOWS)]


def reads(kind: GroupKind, position: int) -> range:
    """The positions that a query reads, from the definition of attention alone."""
    window = kind.window if isinstance(kind, Sliding) else position + 1
    return range(max(0, position - window + 1), position + 1)


@dataclass
class Slots:
    """Random availability: how many slots at the front of each page can be had."""

    kind: GroupKind
    page_tokens: int
    leading: list[int]

    def leading_slots(self, page: int) -> int:
        return self.leading[page]

    def whole_prefix(self, max_pages: int) -> int:
        count = 0
        while count < max_pages and self.leading[count] == self.page_tokens:
            count += 1
        return count

    def last_found(self, page: int) -> int:
        return max((number for number in range(page + 1) if self.leading[number]), default=-1)

    def longest(self, limit: int) -> int:
        return self.kind.longest(limit, self)

    def has(self, position: int) -> bool:
        page, offset = divmod(position, self.page_tokens)
        return offset < self.leading[page]

    def can_start(self, end: int) -> bool:
        """Work may go on at `end` if the query there finds every earlier position that it reads."""
        return all(self.has(p) for p in reads(self.kind, end) if p < end)


def random_slots(rng: Random, kind: GroupKind, page_tokens: int, length: int) -> Slots:
    whole = rng.choice((0.5, 0.8, 0.97))
    leading = [
        page_tokens if rng.random() < whole else rng.randint(0, page_tokens) for _ in range(length // page_tokens + 2)
    ]
    return Slots(kind, page_tokens, leading)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
@pytest.mark.parametrize("page_tokens", PAGES)
def test_longest_hit_equals_trying_every_end(kind: GroupKind, page_tokens: int) -> None:
    rng = Random(page_tokens)
    for _ in range(60):
        held = random_slots(rng, kind, page_tokens, 120)
        limit = rng.randint(0, 120)
        assert held.longest(limit) == max(end for end in range(limit + 1) if held.can_start(end))


@pytest.mark.parametrize("seed", range(6))
def test_longest_common_hit_equals_trying_every_end_in_all_groups(seed: int) -> None:
    rng = Random(seed)
    for _ in range(60):
        groups = [random_slots(rng, rng.choice(KINDS), rng.choice(PAGES), 120) for _ in range(rng.randint(1, 4))]
        limit = rng.randint(0, 120)
        best = max(end for end in range(limit + 1) if all(held.can_start(end) for held in groups))
        assert longest_common(groups, limit) == best


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_needed_is_what_the_query_at_the_end_reads_before_it(kind: GroupKind) -> None:
    for end in range(150):
        needed = kind.needed(end)
        assert list(range(*needed)) == list(reads(kind, end))[:-1]
        assert needed.end == end
        assert kind.first_key(end) == reads(kind, end).start


@pytest.mark.parametrize("window", WINDOWS)
def test_a_margin_adds_that_many_positions_below(window: int) -> None:
    for end in range(150):
        for margin in range(4):
            assert Sliding(window).needed(end, margin).start == max(0, Sliding(window).needed(end).start - margin)
            assert Full().needed(end, margin) == Interval(0, end)


@pytest.mark.parametrize("window", WINDOWS)
def test_freed_at_the_first_end_that_no_longer_reads_it(window: int) -> None:
    kind = Sliding(window)
    for end in range(1, 80):
        first = next(c for c in range(end + window + 1) if reads(kind, c).start >= end)
        assert kind.freed_at(end) == first
    assert Full().freed_at(5) is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_resident_tokens_bound_what_a_step_has_to_hold(kind: GroupKind) -> None:
    for length in (1, 20, 200):
        for step in (1, 5, 64):
            most = 0
            for committed in range(length):
                end = min(length, committed + step)
                read = {p for query in (committed, end - 1) for p in reads(kind, query)}
                most = max(most, end - min(read))
            assert most <= kind.resident_tokens(length, step, 0) <= length
            assert kind.resident_tokens(length, step, 2) >= kind.resident_tokens(length, step, 0)
