"""All arenas of one worker and their indexes, with releases deferred while a step is in flight.

release ──no step in flight──▶ PageArena.release
   └──────step in flight─────▶ pending, until complete(step)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from outrider.errors import ConfigError, OutOfPages
from outrider.kv.layout import KVLayout
from outrider.kv.observer import IndexListener, KVObserver
from outrider.kv.pages import PageArena
from outrider.kv.prefix import GroupIndex, PageRecords


class PagePool:
    """All pages of a worker, by group: a caller never has to know which arena a group lives in."""

    def __init__(
        self,
        layout: KVLayout,
        arena_pages: Sequence[int],
        observer: KVObserver | None,
        listener: IndexListener | None = None,
    ) -> None:
        if len(arena_pages) != len(layout.arena_page_bytes):
            raise ConfigError(
                f"the layout has {len(layout.arena_page_bytes)} arena(s) (page bytes {layout.arena_page_bytes}), "
                f"but arena_pages gives {len(arena_pages)}"
            )
        self.layout = layout
        self.arenas = [PageArena(index, pages, self._evict) for index, pages in enumerate(arena_pages)]
        records = [PageRecords(pages) for pages in arena_pages]
        self.indexes = [GroupIndex(records[arena]) for arena in layout.arena_of]
        self._observer = observer
        self.listener = listener
        self._records = records
        self._arena_of = layout.arena_of
        self._groups_of: list[list[int]] = [[] for _ in arena_pages]
        for group, arena in enumerate(layout.arena_of):
            self._groups_of[arena].append(group)
        self._last_planned = -1
        self.last_completed = -1
        self._pending: deque[tuple[int, int, list[int]]] = deque()
        """(step, arena, pages) that were released while the step, which may still touch them, was in flight."""
        self.pins: Counter[tuple[int, int]] = Counter()
        """References of tiers that are copying pages, by (arena, page)."""

    def arena(self, group: int) -> PageArena:
        return self.arenas[self._arena_of[group]]

    def require(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Raise OutOfPages unless (group, pages) can all be acquired at once."""
        if len(wanted) == 1:
            ((group, count),) = wanted
            arena = self.arenas[self._arena_of[group]]
            if count > arena.num_available:
                raise OutOfPages(arena.index, count - arena.num_available)
            return
        per_arena: dict[int, int] = {}
        for group, count in wanted:
            index = self._arena_of[group]
            per_arena[index] = per_arena.get(index, 0) + count
        for index, count in per_arena.items():
            available = self.arenas[index].num_available
            if count > available:
                raise OutOfPages(index, count - available)

    def acquire(self, group: int, count: int) -> list[int]:
        index = self._arena_of[group]
        pages = self.arenas[index].acquire(count)
        if self._observer and pages:
            self._observer.acquired(index, pages)
        return pages

    def retain(self, group: int, pages: Sequence[int]) -> None:
        index = self._arena_of[group]
        self.arenas[index].retain(pages)
        if self._observer and pages:
            self._observer.retained(index, pages)

    def retain_source(self, group: int, page: int) -> None:
        """Hold a page so that a copy can read it; release_source when the copy has run."""
        self.retain(group, [page])
        if self._observer:
            self._observer.source_held(self._arena_of[group], page)

    def release_source(self, group: int, page: int) -> None:
        if self._observer:
            self._observer.source_let_go(self._arena_of[group], page)
        self.release(group, [page])

    def is_published(self, group: int, page: int, key: bytes) -> bool:
        """Whether the index names this page under this key."""
        return self.indexes[group].pages.get(key) == page

    def pin(self, group: int, page: int) -> None:
        """Hold a published page, so that nothing is written to it while a tier copies it."""
        self.retain_source(group, page)
        self.pins[self._arena_of[group], page] += 1

    def unpin(self, group: int, page: int) -> None:
        pinned = self._arena_of[group], page
        self.pins[pinned] -= 1
        if not self.pins[pinned]:
            del self.pins[pinned]
        self.release_source(group, page)

    def release(self, group: int, pages: list[int]) -> None:
        """Release pages, the first of which are evicted first; a step in flight delays this until it completes."""
        if not pages:
            return
        index = self._arena_of[group]
        if self.step_in_flight:
            self._pending.append((self._last_planned, index, pages))
            if self._observer:
                self._observer.deferred(index, pages, self._last_planned)
        else:
            self._release_now(index, pages)

    def _release_now(self, index: int, pages: list[int]) -> None:
        if self._observer:
            self._observer.releasing(index, pages)
        self.arenas[index].release(pages)

    def quarantine(self, group: int, pages: list[int]) -> None:
        index = self._arena_of[group]
        if self._observer:
            self._observer.quarantined(index, pages)
        self.arenas[index].quarantine(pages)

    def restore(self, group: int, pages: list[int]) -> None:
        index = self._arena_of[group]
        if self._observer:
            self._observer.restored(index, pages)
        self.arenas[index].restore(pages)
        self.release(group, pages)  # a step in flight may still copy into them

    def _evict(self, index: int, pages: list[int]) -> None:
        """Take cached pages of one arena, which may belong to several groups, out of the index."""
        published, groups = self.arenas[index].published, self._groups_of[index]
        for group in groups:
            mine = pages if len(groups) == 1 else [page for page in pages if published[page] == group + 1]
            if self.listener is not None and mine and group < self.layout.num_target:
                self.listener.left(group, list(map(self._records[index].keys.__getitem__, mine)))
            self.indexes[group].remove(mine)
        for page in pages:
            published[page] = 0
        if self._observer:
            for page in pages:
                self._observer.evicted(index, page)

    def reset_cache(self) -> None:
        """Empty the index: cached pages become free, and pages in use are no longer found."""
        for arena in self.arenas:
            arena.forget_cached()
            arena.published[:] = bytes(arena.num_pages)
        self._clear_indexes()
        if self._observer:
            self._observer.cache_reset()

    def begin(self, step: int) -> None:
        """Note that `step` is planned and in flight from now on."""
        assert step == self._last_planned + 1, f"step {step} planned after {self._last_planned}"
        self._last_planned = step

    @property
    def next_step(self) -> int:
        """The number of the step to plan next."""
        return self._last_planned + 1

    @property
    def step_in_flight(self) -> bool:
        return self._last_planned > self.last_completed

    def complete(self, step: int) -> None:
        """Note that the step has run: the pages that it could touch may be reused."""
        assert step == self.last_completed + 1, f"step {step} completed after {self.last_completed}"
        self.last_completed = step
        if self._observer:
            self._observer.completed(step)
        while self._pending and self._pending[0][0] <= step:
            _step, index, pages = self._pending.popleft()
            self._release_now(index, pages)

    def start_over(self) -> None:
        """Make every page free, after a move that was interrupted half-way; no step is in flight any more. Only pages
        that a tier is copying stay held."""
        self.last_completed = self._last_planned
        self._pending.clear()
        for arena in self.arenas:
            arena.start_over({page: count for (index, page), count in self.pins.items() if index == arena.index})
        self._clear_indexes()
        if self._observer:
            self._observer.started_over()

    def _clear_indexes(self) -> None:
        for group_index in self.indexes:
            group_index.clear()
        if self.listener is not None:
            self.listener.cleared()

    def pending(self) -> Iterator[tuple[int, int]]:
        """(arena, page) for each reference that waits for a step to complete."""
        for _step, index, pages in self._pending:
            for page in pages:
                yield (index, page)
