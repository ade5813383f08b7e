"""Half-open token intervals [start, end), and how they map to pages.

Everything that moves or keeps KV speaks in these, never in counts or list lengths: a surplus at either
end, or another page size on the other side, then needs no special case.

    positions   0    4    8    12   16   20
    pages of 8  [   0    )[   1     )[   2 ...
    interval         [4 ------- 14)            touches pages 0 and 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """Token positions [start, end). Empty whenever end <= start."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.start)

    @property
    def empty(self) -> bool:
        return self.end <= self.start

    def covers(self, other: Interval) -> bool:
        return other.empty or (self.start <= other.start and other.end <= self.end)

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


NOTHING = Interval(0, 0)


def intersect(left: Interval, right: Interval) -> Interval:
    start, end = max(left.start, right.start), min(left.end, right.end)
    return Interval(start, end) if start < end else NOTHING


def union(parts: Iterable[Interval]) -> list[Interval]:
    """Returns the positions of `parts` as runs that neither touch nor overlap, in order."""
    runs: list[Interval] = []
    for part in sorted(part for part in parts if not part.empty):
        if runs and part.start <= runs[-1].end:
            runs[-1] = Interval(runs[-1].start, max(runs[-1].end, part.end))
        else:
            runs.append(part)
    return runs


def subtract(whole: Interval, parts: Iterable[Interval]) -> tuple[Interval, ...]:
    """Returns what is left of `whole` without `parts`, in order."""
    rest, start = [], whole.start
    for part in union(parts):
        if start < part.start and start < whole.end:
            rest.append(Interval(start, min(part.start, whole.end)))
        start = max(start, part.end)
    if start < whole.end:
        rest.append(Interval(start, whole.end))
    return tuple(rest)


def covered(whole: Interval, parts: Iterable[Interval]) -> bool:
    """Whether the union of `parts` holds every position of `whole`."""
    return not subtract(whole, parts)


def pages_under(interval: Interval, page_tokens: int) -> range:
    """Returns the numbers of the pages that the interval touches."""
    if interval.empty:
        return range(0)
    return range(interval.start // page_tokens, (interval.end - 1) // page_tokens + 1)


def page_count(end: int, page_tokens: int) -> int:
    """Returns the number of pages that hold positions [0, end)."""
    return -(-end // page_tokens)


class SlotRun(NamedTuple):
    """A contiguous copy of `slots` slots from a page of one side into a page of the other."""

    source_page: int
    source_offset: int
    destination_page: int
    destination_offset: int
    slots: int
    start: int


def pair(
    wanted: Interval,
    *,
    source: Interval,
    source_pages: Sequence[int],
    source_page_tokens: int,
    destination_pages: Sequence[int],
    destination_page_tokens: int,
) -> Iterator[SlotRun]:
    """Map the positions that one side wants and the other holds to runs of slots.

    Both page sequences are indexed by page number (position // page_tokens); either side may hold more, at
    either end. Only the intersection moves, so a surplus page never shifts anything.

        source  (8 per page)   [ b0      )[ b1      )
        wanted                      [4 ------ 12)
        destination (4 / page) [a0 )[a1 )[a2 )[a3 )   ->  b0[4:8] into a1, b1[0:4] into a2
    """
    overlap = intersect(wanted, source)
    position = overlap.start
    while position < overlap.end:
        source_index, source_offset = divmod(position, source_page_tokens)
        destination_index, destination_offset = divmod(position, destination_page_tokens)
        count = min(
            overlap.end - position,
            source_page_tokens - source_offset,
            destination_page_tokens - destination_offset,
        )
        yield SlotRun(
            source_pages[source_index],
            source_offset,
            destination_pages[destination_index],
            destination_offset,
            count,
            position,
        )
        position += count
