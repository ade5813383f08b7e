"""A physical pool of equal-sized pages: how often each is held, which are cached, which are free.

Every page but the null page is in exactly one place:

    free ──acquire──▶ held (refs > 0) ──release──▶ published? ──no──▶ free
                        ▲                              │yes
                        └────retain────  cached (LRU) ◀┘ ──evict──▶ free
                      held ──quarantine──▶ quarantined ──restore──▶ held

The LRU is a queue of pages in the order of their release. A page that is retained again stays in it as a dead
entry, to be skipped when it comes up, and joins it once more at its next release.
A page whose last reference was removed while a step could still touch it stays held until that step completes:
the pool defers the release, and the page is pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from outrider.errors import OutOfPages

NULL_PAGE = 0
"""The page that padded rows and tap rows write to. It is never free, never published and never read."""


class PageArena:
    __slots__ = (
        "_dead",
        "_free",
        "_lru",
        "_on_evict",
        "index",
        "num_cached",
        "num_pages",
        "published",
        "quarantined",
        "refs",
    )

    def __init__(self, index: int, num_pages: int, on_evict: Callable[[int, list[int]], None]) -> None:
        self.index = index
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.refs[NULL_PAGE] = 1
        self.published = bytearray(num_pages)
        """Group number + 1 while the page is in the prefix index, else 0."""
        self.quarantined: set[int] = set()
        self.num_cached = 0
        # A stack: a page freed last is likely still in the cache of the processor.
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._lru: deque[int] = deque()
        self._dead: dict[int, int] = {}
        """How many dead entries a page has in the LRU; they come before its live one."""
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Number of pages that acquire() can hand out: free ones, then cached ones."""
        return len(self._free) + self.num_cached

    @property
    def num_held(self) -> int:
        """Number of pages that a sequence or a copy holds, pending ones included."""
        return self.num_pages - 1 - self.num_available - len(self.quarantined)

    def acquire(self, count: int) -> list[int]:
        """Take `count` pages, evicting the least recently used cached ones. All or nothing."""
        free, refs = self._free, self.refs
        missing = count - len(free)
        if missing > 0:
            if missing > self.num_cached:
                raise OutOfPages(self.index, missing - self.num_cached)
            evicted = self._pop_least_recent(missing)
            self._on_evict(self.index, evicted)
            free += evicted
        if count == 0:
            return []
        pages = free[-count:]
        del free[-count:]
        for page in pages:
            refs[page] = 1
        return pages

    def _pop_least_recent(self, count: int) -> list[int]:
        popleft, dead = self._lru.popleft, self._dead
        self.num_cached -= count
        popped: list[int] = []
        while count:
            page = popleft()
            if page in dead:
                dead[page] -= 1
                if not dead[page]:
                    del dead[page]
            else:
                popped.append(page)
                count -= 1
        return popped

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; a cached page with a reference is held again."""
        refs, dead = self.refs, self._dead
        for page in pages:
            holders = refs[page]
            if not holders:
                dead[page] = dead.get(page, 0) + 1
                self.num_cached -= 1
            refs[page] = holders + 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page. The first pages given are evicted first."""
        refs, published, free = self.refs, self.published, self._free
        cached = []
        for page in pages:
            left = refs[page] - 1
            refs[page] = left
            if left > 0:
                continue
            assert not left, f"page {page} of arena {self.index} released too often"
            if published[page]:
                cached.append(page)
            else:
                free.append(page)
        self._lru += cached
        self.num_cached += len(cached)
        if len(self._lru) > 2 * self.num_pages:
            self._drop_dead_entries()

    def _cached_pages(self) -> list[int]:
        """Returns the cached pages, the least recently used first."""
        last_entries = dict.fromkeys(reversed(self._lru))
        return [page for page in reversed(last_entries) if not self.refs[page]]

    def _drop_dead_entries(self) -> None:
        """Keep the LRU from growing where pages are used again and again, and none is evicted."""
        self._lru = deque(self._cached_pages())
        self._dead.clear()

    def quarantine(self, pages: Iterable[int]) -> None:
        """Put pages aside that a lost transfer may still write to."""
        for page in pages:
            assert self.refs[page] == 1 and not self.published[page], f"page {page} is shared or published"
            self.refs[page] = 0
            self.quarantined.add(page)

    def restore(self, pages: Iterable[int]) -> None:
        """Give pages back to the caller, once the transfer's handle is destroyed and nothing can write to them."""
        for page in pages:
            self.quarantined.remove(page)
            self.refs[page] = 1

    def forget_cached(self) -> None:
        """Free every cached page; the caller empties the index."""
        for page in self._cached_pages():
            self.published[page] = 0
            self._free.append(page)
        self._lru.clear()
        self._dead.clear()
        self.num_cached = 0

    def start_over(self, pinned: Mapping[int, int]) -> None:
        """Make every page free that is neither quarantined nor pinned, whatever its state was. `pinned`: number of
        references that pages keep."""
        self.refs[:] = [0] * self.num_pages
        self.refs[NULL_PAGE] = 1
        for page, count in pinned.items():
            self.refs[page] = count
        self.published[:] = bytes(self.num_pages)
        self.num_cached = 0
        taken = self.quarantined.union(pinned)
        self._free[:] = [page for page in range(self.num_pages - 1, NULL_PAGE, -1) if page not in taken]
        self._lru.clear()
        self._dead.clear()

    def has_duplicates(self) -> bool:
        """Whether a page is on the free list twice."""
        return len(set(self._free)) != len(self._free)

    def check_integrity(self) -> None:
        """Assert that every page but the null page is in exactly one place."""
        free, cached = set(self._free), set(self._cached_pages())
        assert len(free) == len(self._free), f"arena {self.index}: a page is on the free list twice"
        assert len(cached) == self.num_cached, (
            f"arena {self.index}: {self.num_cached} cached pages, {len(cached)} in the LRU"
        )
        assert not free & cached and not (free | cached) & self.quarantined
        for page in range(1, self.num_pages):
            idle = page in free or page in cached or page in self.quarantined
            assert idle == (self.refs[page] == 0), f"arena {self.index}: page {page} is in two places, or in none"
            assert not (page in free and self.published[page]), f"arena {self.index}: free page {page} is published"
        assert self.refs[NULL_PAGE] == 1 and not self.published[NULL_PAGE]
