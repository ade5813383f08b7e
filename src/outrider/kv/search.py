"""The hit search: how much of a sequence the cache can serve.

A `GroupView` answers, for one sequence and one group, how many slots at the front of each page are
available. Which of them a hit needs is the group kind's business (`GroupKind.needed`), which also decides what
is retained; so search and retention cannot drift apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from outrider.kv.footprint import GroupSpec
from outrider.kv.intervals import Interval
from outrider.kv.pages import NULL_PAGE
from outrider.kv.prefix import RUN_BLOCKS, Chain, GroupIndex, Tier


class Found(NamedTuple):
    """The front of one page: on the device as `page`, or (page 0) in another tier."""

    slots: int
    page: int


MISSING = Found(0, 0)
LONGEST_STRETCH = 256
"""Most pages that the search skips at once where the index holds nothing."""


class GroupView:
    """What the cache holds of one sequence in one group."""

    __slots__ = (
        "_chain",
        "_found",
        "_index",
        "_step",
        "_tiers",
        "_tokens",
        "group",
        "page_tokens",
        "reach",
        "spec",
        "whole",
    )

    def __init__(
        self,
        group: int,
        spec: GroupSpec,
        reach: int,
        index: GroupIndex,
        chain: Chain,
        tokens: array[int],
        tiers: Sequence[Tier],
    ) -> None:
        self.group = group
        self.spec = spec
        self.page_tokens = spec.page_tokens
        self.reach = reach
        self.whole: list[int] = []
        """Device pages of the first page numbers, as far as they were found whole."""
        self._index = index
        self._chain = chain
        self._tokens = tokens
        self._tiers = tiers
        self._step = spec.page_tokens // chain.grain
        self._found: dict[int, Found] = {}

    def key(self, page: int) -> bytes | None:
        """Returns the page's key, or None while the tokens that determine it are not all known."""
        end = (page + 1) * self.page_tokens
        if end + self.reach > len(self._tokens):
            return None
        base = self._chain.bases[(page + 1) * self._step]
        return base + self._chain.successors(self._tokens, end, self.reach) if self.reach else base

    def find(self, page: int) -> Found:
        if page < len(self.whole):
            return Found(self.page_tokens, self.whole[page])
        found = self._found.get(page)
        if found is None:
            found = self._found[page] = self._find(page)
        return found

    def leading_slots(self, page: int) -> int:
        return self.find(page).slots

    def _find(self, page: int) -> Found:
        key = self.key(page)
        if key is not None:
            device_page = self._index.pages.get(key)
            if device_page is not None:
                return Found(self.page_tokens, device_page)
            for tier in self._tiers:
                if tier.contains(self.group, key):
                    return Found(self.page_tokens, 0)
        start, end = page * self.page_tokens, (page + 1) * self.page_tokens + self.reach
        if self._chain.media and self._chain.has_media(start, end):
            return MISSING
        content = self._tokens[start:end].tobytes()
        device_page, common = self._index.closest(self._chain.bases[page * self._step], content)
        # A slot is right only if the tokens it reaches ahead to agree as well.
        slots = min(self.page_tokens, common - self.reach)
        return Found(slots, device_page) if slots > 0 else MISSING

    def whole_prefix(self, max_pages: int) -> int:
        """Returns how many of the first `max_pages` pages are available whole, without a gap."""
        size = self.page_tokens
        if len(self.whole) < max_pages:
            self._extend_whole(max_pages)
        page = min(max_pages, len(self.whole))
        while page < max_pages and self.find(page).slots == size:
            page += 1
        return page

    def _extend_whole(self, max_pages: int) -> None:
        """Follow the chain through the device's index for as long as it holds.

        Pages are looked up many at a time, at the speed of C; not many against what was found before them, so
        that a miss wastes little; and in whole runs, whose keys may be remembered. Finding nothing at all is
        common, and cheap to make sure of.
        """
        get, whole, keys = self._index.pages.get, self.whole, self._chain.keys
        tokens, size, reach = self._tokens, self.page_tokens, self.reach
        known = min(max_pages, (len(tokens) - reach) // size)
        if not whole and known and self.key(0) not in self._index.pages:
            return
        while len(whole) < known:
            runs = 1 + len(whole) // (4 * RUN_BLOCKS)
            first, stop = len(whole), min(known, len(whole) + runs * RUN_BLOCKS)
            found = list(map(get, keys(tokens, size, reach, first, stop), repeat(NULL_PAGE)))
            if not all(found):
                whole += found[: found.index(NULL_PAGE)]
                return
            whole += found

    def last_found(self, page: int) -> int:
        """Returns the last page, at or before this one, of which any slot is available; -1 if there is none.

        Stretches of which the index holds nothing are skipped at the speed of C.
        """
        keys, index, bases = self._chain.keys, self._index, self._chain.bases
        tokens, size, reach, step = self._tokens, self.page_tokens, self.reach, self._step
        stretch = RUN_BLOCKS
        while page >= 0:
            first = max(0, page + 1 - stretch)
            last_known = min(page + 1, (len(tokens) - reach) // size)
            nothing = (
                not self._tiers
                and index.knows_none(keys(tokens, size, reach, first, last_known))
                and index.continues_none(bases[first * step : page * step + 1 : step])
            )
            if not nothing:
                for candidate in range(page, first - 1, -1):
                    if self.find(candidate).slots:
                        return candidate
            page, stretch = first - 1, min(2 * stretch, LONGEST_STRETCH)
        return -1

    def prefix_end(self, limit: int) -> int:
        """Returns the end of the run of slots that starts at 0; it is not followed past the page of `limit`."""
        whole = self.whole_prefix(limit // self.page_tokens)
        return whole * self.page_tokens + (self.find(whole).slots if whole * self.page_tokens < limit else 0)

    def longest(self, limit: int) -> int:
        """Returns the largest end <= limit at which this group holds everything needed."""
        return self.spec.kind.longest(limit, self)

    def run_before(self, end: int, floor: int = 0) -> int:
        """Returns the start of the longest available run of slots [start, end); `end` itself if there is none.

        The run is not followed below the page of `floor`.
        """
        size = self.page_tokens
        last = (end - 1) // size
        if end <= 0 or self.find(last).slots < end - last * size:
            return end
        lowest = floor // size
        if lowest == 0 and self.whole_prefix(last) == last:
            return 0
        page = last
        while page > lowest and self.find(page - 1).slots == size:
            page -= 1
        return page * size

    def holds(self, interval: Interval) -> bool:
        """Whether every slot of the interval is available."""
        if interval.empty:
            return True
        size = self.page_tokens
        last = (interval.end - 1) // size
        if self.find(last).slots < interval.end - last * size:
            return False
        if interval.start < size:
            return self.whole_prefix(last) == last
        return all(self.find(page).slots == size for page in range(interval.start // size, last))


def longest_common(views: Sequence[GroupView], limit: int) -> int:
    """Returns the largest end <= limit at which every one of the groups holds everything needed.

    Each group can only lower the end, so repeating until none does finds the largest common one.
    """
    end, agreed = limit, 0
    while agreed < len(views):
        for view in views:
            shorter = view.longest(end)
            agreed = agreed + 1 if shorter == end else 1
            end = shorter
            if agreed >= len(views):
                break
    return end
