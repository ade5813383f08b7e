"""All arenas of one worker and their indexes, with releases deferred while a step is in flight.

release ──no step in flight──▶ PageArena.release
   └──────step in flight─────▶ pending, until complete(step)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from outrider.errors import ConfigError, OutOfPages
from outrider.kv.layout import KVLayout
from outrider.kv.observer import KVObserver
from outrider.kv.pages import PageArena
from outrider.kv.prefix import GroupIndex, PageRecords


class PagePool:
    """Pages by group: a caller never has to know which arena a group lives in."""

    def __init__(self, layout: KVLayout, arena_pages: Sequence[int], observer: KVObserver | None) -> None:
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
        self._arena_of = layout.arena_of
        self._groups_of: list[list[int]] = [[] for _ in arena_pages]
        for group, arena in enumerate(layout.arena_of):
            self._groups_of[arena].append(group)
        self._last_planned = -1
        self.last_completed = -1
        self._pending: deque[tuple[int, int, list[int]]] = deque()
        """(step, arena, pages): let go of, but the step may still touch them."""

    def arena(self, group: int) -> PageArena:
        return self.arenas[self._arena_of[group]]

    def require(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Raise OutOfPages unless (group, pages) can all be had together."""
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

    def release(self, group: int, pages: list[int]) -> None:
        """Let go; the first pages given are evicted first. Nothing that a step may touch is reused yet."""
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
        """Take cached pages of one arena, of whatever groups, out of the index."""
        published, groups = self.arenas[index].published, self._groups_of[index]
        for group in groups:
            mine = pages if len(groups) == 1 else [page for page in pages if published[page] == group + 1]
            self.indexes[group].remove(mine)
        for page in pages:
            published[page] = 0
        if self._observer:
            for page in pages:
                self._observer.evicted(index, page)

    def reset_cache(self) -> None:
        """Forget every page that nobody holds; pages in use leave the index as well."""
        for arena in self.arenas:
            arena.forget_cached()
            arena.published[:] = bytes(arena.num_pages)
        for group_index in self.indexes:
            group_index.clear()
        if self._observer:
            self._observer.cache_reset()

    def begin(self, step: int) -> None:
        """From now on `step` is in flight."""
        assert step == self._last_planned + 1, f"step {step} planned after {self._last_planned}"
        self._last_planned = step

    @property
    def next_step(self) -> int:
        """The step to plan next."""
        return self._last_planned + 1

    @property
    def step_in_flight(self) -> bool:
        return self._last_planned > self.last_completed

    def complete(self, step: int) -> None:
        """The step has run: what it could touch may be reused."""
        assert step == self.last_completed + 1, f"step {step} completed after {self.last_completed}"
        self.last_completed = step
        if self._observer:
            self._observer.completed(step)
        while self._pending and self._pending[0][0] <= step:
            _step, index, pages = self._pending.popleft()
            self._release_now(index, pages)

    def start_over(self) -> None:
        """No step is in flight, nobody holds a page, nothing is cached: the way out of half a move."""
        self.last_completed = self._last_planned
        self._pending.clear()
        for arena in self.arenas:
            arena.start_over()
        for group_index in self.indexes:
            group_index.clear()
        if self._observer:
            self._observer.started_over()

    def pending(self) -> Iterator[tuple[int, int]]:
        """(arena, page) for each reference that waits for a step to complete."""
        for _step, index, pages in self._pending:
            for page in pages:
                yield (index, page)
