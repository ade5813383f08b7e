"""The moves that the manager's rules are made of: acquiring, sharing, copying and releasing pages of sequences.

Every move keeps three records consistent: the ledger, the references in the pool, and what the next plan must
tell the runner. Decisions are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outrider.errors import OutOfPages
from outrider.kv.admission import GroupAllocation
from outrider.kv.intervals import Interval, page_count
from outrider.kv.layout import KVLayout
from outrider.kv.ledger import GroupPages, Load, LoadState, SequenceKV
from outrider.kv.loading import run_start
from outrider.kv.observer import KVObserver
from outrider.kv.pages import NULL_PAGE
from outrider.kv.plan import KVPlan, PageAssignment, PageCopy
from outrider.kv.pool import PagePool

NEVER = 1 << 62

GroupSizes = list[tuple[int, int]]
"""(group, page_tokens) pairs, so that loops over groups look nothing up."""


class Holdings:
    def __init__(self, layout: KVLayout, pool: PagePool, observer: KVObserver | None) -> None:
        self.layout = layout
        self.pool = pool
        self.target: GroupSizes = [(g, layout.groups[g].page_tokens) for g in layout.target_groups]
        self.draft: GroupSizes = [(g, layout.groups[g].page_tokens) for g in layout.draft_groups]
        self._both = self.target + self.draft
        self._observer = observer
        self._assignments: list[PageAssignment] = []
        self._copies: list[PageCopy] = []
        """Copies for the next plan. Each source page is held until the step that copies completes."""
        self._copying: list[SequenceKV] = []
        """Sequences with a copy that no plan has taken yet."""
        self._forgotten: list[str] = []

    def groups(self, sequence: SequenceKV) -> GroupSizes:
        """Returns the groups in which the sequence holds pages."""
        return self._both if sequence.drafting else self.target

    # ---- acquiring ---------------------------------------------------------------------------------

    def hold(self, allocations: list[GroupAllocation]) -> None:
        """Hold what the search found before fresh pages are acquired, which may evict it."""
        for allocation in allocations:
            self.pool.retain(allocation.view.group, allocation.placement.shared)
            for _, source, _ in allocation.placement.copied:
                self.pool.retain_source(allocation.view.group, source)

    def let_go(self, allocations: list[GroupAllocation]) -> None:
        """Release what hold() took."""
        for allocation in allocations:
            self.pool.release(allocation.view.group, allocation.placement.shared[::-1])
            for _, source, _ in allocation.placement.copied:
                self.pool.release_source(allocation.view.group, source)

    def require(self, allocations: list[GroupAllocation]) -> None:
        """Raise OutOfPages unless there are enough fresh pages for all allocations."""
        self.pool.require([(allocation.view.group, allocation.num_fresh) for allocation in allocations])

    def fill(self, sequence: SequenceKV, allocation: GroupAllocation) -> None:
        """Put the pages of an allocation in place; fresh ones were required before."""
        g, size, placement = allocation.view.group, allocation.view.page_tokens, allocation.placement
        first = placement.first_page
        spare = self.pool.acquire(g, allocation.num_fresh)
        if placement.loads:
            filled = [page if page is not None else spare.pop() for page in placement.pages] + spare
        else:
            filled = placement.shared + spare  # only the last page can be one that is copied
        if self._observer:
            for offset, page in enumerate(placement.pages):
                if page is not None:
                    self._observer.shared(sequence, g, first + offset, page, size)
            for number, source, slots in placement.copied:
                self._observer.shared(sequence, g, number, source, slots)
        for number, source, slots in placement.copied:
            self.copy_later(sequence, g, source, filled[number - first], 0, slots)
        for load in placement.loads:
            sequence.loads[load] = LoadState.PENDING
        if not allocation.pull.empty:
            sequence.loads[Load(g, allocation.pull, None)] = LoadState.PENDING
        sequence.groups[g].place(first, filled, low=placement.low, published=placement.published)

    def missing(self, sequence: SequenceKV, groups: GroupSizes, end: int) -> list[tuple[int, int]]:
        """Returns (group, number of pages) that are not held yet up to `end`."""
        missing = []
        for g, size in groups:
            count = -(-end // size) - len(sequence.groups[g].pages)
            if count > 0:
                missing.append((g, count))
        return missing

    def could_hold(self, sequence: SequenceKV, target_pages: Sequence[int]) -> bool:
        """Whether each target group could hold this many pages, counting those it holds."""
        wanted = [(g, max(0, pages - sequence.groups[g].num_held)) for g, pages in enumerate(target_pages)]
        try:
            self.pool.require(wanted)
        except OutOfPages:
            return False
        return True

    def grow(self, sequence: SequenceKV, missing: list[tuple[int, int]]) -> None:
        """Append fresh pages, which were required before."""
        for g, count in missing:
            state = sequence.groups[g]
            pages = self.pool.acquire(g, count)
            first = len(state.pages)
            self._assignments.append(PageAssignment(sequence.id, g, first, tuple(pages), state.low))
            state.pages += pages
        self.measure_room(sequence)

    def share_pages(self, parent: SequenceKV, child: SequenceKV, groups: GroupSizes, end: int) -> None:
        """Give the child the parent's slots below `end`: whole pages by reference, the last one by copy."""
        held_from = {g: parent.groups[g].held_from(size) for g, size in groups}
        partial = [g for g, size in groups if end % size and held_from[g] < end]
        self.pool.require([(g, 1) for g in partial])
        for g, size in groups:
            state, low, whole = parent.groups[g], held_from[g], end // size
            if low >= end:
                child.groups[g].place(whole, (), low=end, published=page_count(end, size))
                continue
            pages = state.pages[state.first_page : whole]
            self.pool.retain(g, pages)
            if g in partial:
                source, start = state.pages[whole], whole * size
                self.pool.retain_source(g, source)
                (fresh,) = self.pool.acquire(g, 1)
                self.copy_later(child, g, source, fresh, max(0, low - start), end - start)
                pages = [*pages, fresh]
            published = max(state.first_page, min(whole, state.published), page_count(low, size))
            child.groups[g].place(state.first_page, pages, low=low, published=published)

    def is_read_elsewhere(self, sequence: SequenceKV, g: int, number: int) -> bool:
        """Whether a page that the sequence holds is published, or held by another sequence too."""
        state, arena = sequence.groups[g], self.pool.arena(g)
        if not state.first_page <= number < len(state.pages):
            return False
        page = state.pages[number]
        return arena.refs[page] > 1 or bool(arena.published[page])

    def copy_later(self, sequence: SequenceKV, g: int, source: int, destination: int, first: int, stop: int) -> None:
        """Copy in the next plan; the source, which the caller holds, is released when that step completes."""
        self._copies.append(PageCopy(g, source, destination, first, stop))
        sequence.copy_step = NEVER
        self._copying.append(sequence)

    # ---- releasing ---------------------------------------------------------------------------------

    def give_back(self, g: int, pages: Sequence[int]) -> None:
        """Release pages of one group; those nearest the end are evicted first."""
        held = list(pages[::-1])
        if NULL_PAGE in held:
            held = [page for page in held if page != NULL_PAGE]
        self._cancel_copies(g, held)
        self.pool.release(g, held)

    def _cancel_copies(self, g: int, pages: Sequence[int]) -> None:
        """Drop copies into these pages that no plan has taken, and let go of their sources: another sequence may hold
        the pages by the time the copies would run."""
        if self._copies and pages:
            arena_of, arena, gone = self.layout.arena_of, self.layout.arena_of[g], set(pages)
            copies, self._copies = self._copies, []
            for copy in copies:
                if arena_of[copy.group] == arena and copy.destination in gone:
                    self.pool.release_source(copy.group, copy.source)
                else:
                    self._copies.append(copy)

    def cut(self, sequence: SequenceKV, g: int, size: int, end: int) -> None:
        """Release the pages past position end - 1."""
        state = sequence.groups[g]
        keep = max(page_count(end, size), state.first_page)
        if keep < len(state.pages):
            self.give_back(g, state.pages[keep:])
            del state.pages[keep:]

    def free_front(self, g: int, state: GroupPages, stop: int) -> None:
        """Release the pages before page number `stop`."""
        stop = min(stop, len(state.pages))
        if stop > state.first_page:
            freed = state.pages[state.first_page : stop]
            state.pages[state.first_page : stop] = [NULL_PAGE] * len(freed)
            state.first_page = stop
            self.give_back(g, freed)

    def keep_run(self, sequence: SequenceKV, g: int, size: int, parts: Sequence[Interval], end: int) -> None:
        """Keep the run of held parts that stops at `end`, if there is one, and release the rest."""
        state, low = sequence.groups[g], run_start(parts, end)
        if low < end:
            self.cut(sequence, g, size, end)
            state.low = low
            state.published = max(state.published, page_count(low, size))
        else:
            self.give_back(g, state.held())
            state.place(end // size, (), low=end, published=page_count(end, size))

    def set_aside(self, sequence: SequenceKV, load: Load) -> list[int]:
        """Quarantine the pages that a lost transfer may still write to, and return them."""
        state, size = sequence.groups[load.group], self.layout.groups[load.group].page_tokens
        first, stop = load.interval.start // size, page_count(load.interval.end, size)
        # Two loads may write to one page; the first one sets it aside.
        numbers = [number for number in range(first, stop) if state.pages[number] != NULL_PAGE]
        pages = [state.pages[number] for number in numbers]
        self._cancel_copies(load.group, pages)
        self.pool.quarantine(load.group, pages)
        for number in numbers:
            state.pages[number] = NULL_PAGE
        return pages

    def set_pending_aside(self, sequence: SequenceKV) -> list[tuple[int, list[int]]]:
        """Quarantine the pages of every load that has not ended, and return them as (group, pages)."""
        pending = [load for load, state in sequence.loads.items() if state is LoadState.PENDING]
        return [(load.group, self.set_aside(sequence, load)) for load in pending]

    def return_all(self, sequence: SequenceKV) -> None:
        """Release everything that the sequence holds."""
        for g, state in enumerate(sequence.groups):
            self.give_back(g, state.held())
        sequence.reset(len(self.layout.groups))
        if self._observer:
            self._observer.ended(sequence)

    def forget(self, sequence: SequenceKV) -> None:
        """Tell the runner that the sequence is gone."""
        self._forgotten.append(sequence.id)

    # ---- what follows from it ----------------------------------------------------------------------

    def measure_room(self, sequence: SequenceKV) -> None:
        """Work out how far each owner's pages reach, and the last v at which a page is surplus."""
        groups, room, surplus = sequence.groups, NEVER, -1
        headroom = sequence.target_headroom
        for g, size in self.target:
            end = len(groups[g].pages) * size
            if end < room:
                room = end
            if end - size - headroom > surplus:
                surplus = end - size - headroom
        sequence.target_room, room = room, NEVER
        headroom = sequence.draft_headroom
        for g, size in self.draft if sequence.drafting else ():
            end = len(groups[g].pages) * size
            if end < room:
                room = end
            if end - size - headroom > surplus:
                surplus = end - size - headroom
        sequence.draft_room, sequence.surplus_until = room, surplus

    def assign_all(self, sequence: SequenceKV) -> None:
        """Tell the runner the whole table of every group that the sequence has."""
        for g, _size in self.groups(sequence):
            state = sequence.groups[g]
            self._assignments.append(PageAssignment(sequence.id, g, 0, tuple(state.pages), state.low))

    def copies_outstanding(self, sequence: SequenceKV) -> bool:
        """Whether a page of the sequence still waits for its copy; until then none of its pages may be published."""
        return sequence.copy_step > self.pool.last_completed

    def take_plan(self, step: int) -> KVPlan:
        """Returns everything that changed since the last plan; from now on `step` is in flight."""
        plan = KVPlan(
            step=step,
            assignments=tuple(self._assignments),
            copies=tuple(self._copies),
            forgotten=tuple(self._forgotten),
        )
        self.pool.begin(step)
        for copy in self._copies:
            self.pool.release_source(copy.group, copy.source)  # deferred: this very step still reads it
        for sequence in self._copying:
            if sequence.copy_step == NEVER:
                sequence.copy_step = step
        self._assignments, self._copies, self._copying, self._forgotten = [], [], [], []
        return plan

    def tell_again(self, plan: KVPlan) -> None:
        """Repeat in the next plan what this one, which may not have been carried out, was to forget."""
        self._forgotten[:0] = plan.forgotten

    def start_over(self, sequences: dict[str, SequenceKV], kept: Collection[str]) -> None:
        """A move was interrupted half-way. No sequence holds anything, the runner's tables go, some sequences stay."""
        self._assignments, self._copies, self._copying = [], [], []
        self._forgotten += sequences
        for sequence in list(sequences.values()):
            sequence.reset(len(self.layout.groups))
            sequence.chain.forget()
            if self._observer:
                self._observer.ended(sequence)
            if sequence.id not in kept:
                del sequences[sequence.id]
        self.pool.start_over()

    def count_references(self, sequences: Sequence[SequenceKV]) -> list[list[int]]:
        """Returns the number of holders that the ledger knows of, per arena and page."""
        refs = [[0] * arena.num_pages for arena in self.pool.arenas]
        for sequence in sequences:
            for g, state in enumerate(sequence.groups):
                for page in state.held():
                    refs[self.layout.arena_of[g]][page] += 1
        for arena_index, page in self.pool.pending():
            refs[arena_index][page] += 1
        for copy in self._copies:
            refs[self.layout.arena_of[copy.group]][copy.source] += 1
        for (arena_index, page), count in self.pool.pins.items():
            refs[arena_index][page] += count
        for counted in refs:
            counted[NULL_PAGE] = 1
        return refs

    def check_integrity(self, sequences: Sequence[SequenceKV]) -> None:
        """Assert that arenas and ledger agree about every reference."""
        for arena, counted in zip(self.pool.arenas, self.count_references(sequences), strict=True):
            arena.check_integrity()
            assert counted == arena.refs, f"arena {arena.index}: ledger and reference counts disagree"
