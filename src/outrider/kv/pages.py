"""A physical pool of equal-sized pages: who holds each, which are cached, which are free.

Every page but the sink is in exactly one place:

    free ──acquire──▶ held (refs > 0) ──release──▶ published? ──no──▶ free
                        ▲                              │yes
                        └────retain────  cached (LRU) ◀┘ ──evict──▶ free
                      held ──quarantine──▶ quarantined ──restore──▶ held

A page whose last holder let go while a step could still touch it stays held until that step completes:
the pool defers the release, and the page is pending.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from outrider.errors import ConfigError, OutOfPages

SINK = 0
"""Padded rows and tap rows write here. Never free, never published, never read."""


class PageArena:
    __slots__ = ("_cached", "_free", "_on_evict", "index", "num_pages", "published", "quarantined", "refs")

    def __init__(self, index: int, num_pages: int, on_evict: Callable[[int, int], None]) -> None:
        if num_pages < 2:
            raise ConfigError(
                f"arena {index} has {num_pages} page(s); it needs at least 2, since one is the sink: raise the memory"
            )
        self.index = index
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.refs[SINK] = 1
        self.published = bytearray(num_pages)
        """Group number + 1 while the page is in the prefix index, else 0."""
        self.quarantined: set[int] = set()
        # A stack: a page freed last is likely still in the cache of the processor.
        self._free = list(range(num_pages - 1, SINK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that acquire() can hand out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages somebody holds, pending ones included."""
        return self.num_pages - 1 - self.num_available - len(self.quarantined)

    def acquire(self, count: int) -> list[int]:
        """Take `count` pages, evicting the least recently used cached ones. All or nothing."""
        free = self._free
        missing = count - len(free)
        if missing > 0:
            if missing > len(self._cached):
                raise OutOfPages(self.index, missing - len(self._cached))
            for _ in range(missing):
                page, _none = self._cached.popitem(last=False)
                self._on_evict(self.index, page)
                free.append(page)
        if count == 0:
            return []
        pages = free[-count:]
        del free[-count:]
        refs = self.refs
        for page in pages:
            refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder for each page; a cached page leaves the LRU."""
        refs = self.refs
        for page in pages:
            if refs[page] == 0:
                del self._cached[page]
            refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each page. The first pages given are evicted first."""
        refs, published, free, cached = self.refs, self.published, self._free, self._cached
        for page in pages:
            left = refs[page] - 1
            assert left >= 0, f"page {page} of arena {self.index} released too often"
            refs[page] = left
            if left == 0:
                if published[page]:
                    cached[page] = None
                else:
                    free.append(page)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Set aside pages that a lost transfer may still write to."""
        for page in pages:
            assert self.refs[page] == 1 and not self.published[page], f"page {page} is shared or published"
            self.refs[page] = 0
            self.quarantined.add(page)

    def restore(self, pages: Iterable[int]) -> None:
        """The transfer's handle is destroyed: it cannot write to these pages any more. The caller holds them."""
        for page in pages:
            self.quarantined.remove(page)
            self.refs[page] = 1

    def forget_cached(self) -> None:
        """Empty the LRU; the caller empties the index."""
        for page in self._cached:
            self.published[page] = 0
            self._free.append(page)
        self._cached.clear()

    def has_duplicates(self) -> bool:
        """Is a page on the free list twice?"""
        return len(set(self._free)) != len(self._free)

    def check_integrity(self) -> None:
        """Every page but the sink is in exactly one place."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), f"arena {self.index}: a page is on the free list twice"
        assert not free & cached and not (free | cached) & self.quarantined
        for page in range(1, self.num_pages):
            idle = page in free or page in cached or page in self.quarantined
            assert idle == (self.refs[page] == 0), f"arena {self.index}: page {page} is in two places, or in none"
            assert not (page in free and self.published[page]), f"arena {self.index}: free page {page} is published"
        assert self.refs[SINK] == 1 and not self.published[SINK]
