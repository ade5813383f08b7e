"""The KV manager: the one place that changes who holds which slot.

Life of a sequence:

    open ─▶ admit ─▶ [loads arrive: import_interval / fail_load ─▶ finish_loading] ─▶ reserve ─▶ commit ─┐
             ▲                                                                          ▲─────────────────┤
             └────────────────────────── release (preempted, or done) ◀───────────────────────────────────┘

Reservation of a step that schedules [c, c + m) and proposes k drafts:

    target groups   [0 ---- c)[c --- c + m)
    draft groups    [0 ---- durable_end(c))[ feed ... c + m)[ scratch_ahead(k) )

Who frees what: pages of the sequence go back in release, in the trim of commit, and behind a window in
commit; sources of copies when the step that copies completes. With a step in flight nothing is reused
before that step completes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.errors import AdmissionError, OutOfPages, RequestError
from outrider.kv.admission import Placement, find_hit, place
from outrider.kv.intervals import NOTHING, Interval, page_count, subtract
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import GroupPages, Load, LoadState, SequenceKV
from outrider.kv.loading import arrived_parts, first_failure, longest_held, run_start, wanted
from outrider.kv.observer import Hit, KVObserver
from outrider.kv.pages import SINK
from outrider.kv.plan import KVPlan, PageAssignment, PageCopy
from outrider.kv.pool import PagePool
from outrider.kv.prefix import TOKEN_BYTES, Chain, Media, Tier
from outrider.kv.search import GroupView

NEVER = 1 << 62


class Admission(NamedTuple):
    """What a sequence starts with."""

    hit: int
    loads: tuple[Load, ...]


class Seating(NamedTuple):
    """How one group of a new sequence is filled: from the cache, and from a peer."""

    view: GroupView
    placement: Placement
    pull: Interval

    @property
    def num_fresh(self) -> int:
        """Pages to take: for copies, for loads, and for what a peer sends past what is placed."""
        placement, size = self.placement, self.view.page_tokens
        beyond = 0
        if not self.pull.empty:
            placed = placement.first_page + len(placement.pages)
            beyond = max(0, page_count(self.pull.end, size) - placed)
        return len(placement.copied) + len(placement.loads) + beyond


class KVManager:
    def __init__(
        self,
        layout: KVLayout,
        config: KVConfig,
        *,
        observer: KVObserver | None = None,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self.layout = layout
        self.config = config
        self.tiers = tiers
        self.pool = PagePool(layout, config.arena_pages, observer)
        self.sequences: dict[str, SequenceKV] = {}
        self.dropped_drafts = 0
        self.hit_tokens = 0
        self.queried_tokens = 0
        self._observer = observer
        self._footprint = layout.footprint
        self._lead = layout.footprint.durable_lead
        self._roots: dict[tuple[str, str], bytes] = {}
        self._assignments: list[PageAssignment] = []
        self._copies: list[PageCopy] = []
        self._copy_sources: list[tuple[int, int]] = []
        """(group, page): held until the step that copies completes."""
        self._copying: list[SequenceKV] = []
        """Sequences with a copy that no plan has taken yet."""
        self._forgotten: list[str] = []
        # (group, page_tokens), so that loops over groups look nothing up.
        self._target = [(g, layout.groups[g].page_tokens) for g in layout.target_groups]
        self._draft = [(g, layout.groups[g].page_tokens) for g in layout.draft_groups]

    def _held_groups(self, sequence: SequenceKV) -> list[tuple[int, int]]:
        return self._target + self._draft if sequence.drafting else self._target

    def _durable_end(self, sequence: SequenceKV, group: int) -> int:
        return sequence.committed if group < self.layout.num_target else sequence.draft_end

    # ---- opening and admission ---------------------------------------------------------------------

    def open(
        self,
        id: str,
        tokens: array[int],
        *,
        total_tokens: int,
        k: int = 0,
        adapter: str = "",
        salt: str = "",
        media: tuple[Media, ...] = (),
    ) -> SequenceKV:
        """Enter a sequence that will grow to at most total_tokens. It holds nothing until admitted."""
        if id in self.sequences:
            raise RequestError(f"request id {id!r} is in use; choose another")
        self._check_worst_case(id, total_tokens, k)
        chain = Chain(self._root(adapter, salt), self.layout.grain, media)
        sequence = SequenceKV(id, tokens, chain, len(self.layout.groups), (adapter, salt))
        ahead = self.config.steps_ahead * (1 + k)
        sequence.target_headroom = ahead
        sequence.draft_headroom = ahead + self._footprint.scratch_ahead(k) + self._lead
        self.sequences[id] = sequence
        return sequence

    def _root(self, adapter: str, salt: str) -> bytes:
        root = self._roots.get((adapter, salt))
        if root is None:
            root = self._roots[adapter, salt] = self.config.identity.root(adapter=adapter, salt=salt)
        return root

    def worst_case_pages(self, total_tokens: int, k: int, *, draft: bool) -> list[int]:
        """Pages per arena that a sequence could hold at once, running alone."""
        ahead = self.config.steps_ahead
        step = max(self.config.step_tokens, 1 + k)
        pages = [0] * len(self.pool.arenas)
        groups = range(len(self.layout.groups)) if draft else self.layout.target_groups
        for g in groups:
            spec = self.layout.groups[g]
            length, margin = total_tokens, self.layout.margin
            if g >= self.layout.num_target:
                length += self._footprint.scratch_ahead(k) + self._lead
                margin += self._footprint.scratch_ahead(k) + self._lead
            # A step in flight keeps what the step before it used; one page more at each ragged end, and
            # the source of a copy.
            resident = spec.kind.resident_tokens(length, step * ahead, margin)
            bound = page_count(length, spec.page_tokens)
            freed_late = page_count(step, spec.page_tokens) if ahead > 1 else 0
            pages[self.layout.arena_of[g]] += (
                min(bound, page_count(resident, spec.page_tokens) + 1 + freed_late) + 1
            )
        return pages

    def _check_worst_case(self, id: str, total_tokens: int, k: int) -> None:
        for arena, pages in zip(
            self.pool.arenas, self.worst_case_pages(total_tokens, k, draft=False), strict=True
        ):
            if pages > arena.num_pages - 1:
                raise AdmissionError(
                    f"request {id!r} may grow to {total_tokens} tokens and needs up to {pages} pages of arena "
                    f"{arena.index} ({self.layout.arena_page_bytes[arena.index]} bytes each), which has "
                    f"{arena.num_pages - 1}; shorten the prompt, lower max_tokens, or give the KV cache more memory"
                )

    def draft_fits(self, total_tokens: int, k: int) -> bool:
        """Could the sequence's draft groups be held beside its target groups, running alone?"""
        worst = self.worst_case_pages(total_tokens, k, draft=True)
        return all(pages <= arena.num_pages - 1 for arena, pages in zip(self.pool.arenas, worst, strict=True))

    def search(self, sequence: SequenceKV, limit: int, *, draft: bool) -> tuple[Hit, list[GroupView]]:
        """The hit for this sequence on the cache as it is now. Changes nothing."""
        sequence.chain.extend(sequence.tokens, len(sequence.tokens))
        views = [
            GroupView(
                g,
                self.layout.groups[g],
                self.layout.reach[g],
                self.pool.indexes[g],
                sequence.chain,
                sequence.tokens,
                self.tiers,
            )
            for g in (range(len(self.layout.groups)) if draft else self.layout.target_groups)
        ]
        return find_hit(views, self.layout.num_target, self._footprint, limit, draft=draft), views

    def admit(
        self,
        sequence: SequenceKV,
        *,
        use_cache: bool = True,
        may_draft: bool = True,
        remote: Mapping[int, Interval] | None = None,
    ) -> Admission:
        """Take everything the cache has for this sequence; raise OutOfPages, holding nothing, if it cannot.

        With `remote`, a peer holds those intervals per group. Pages for what is missing here are taken too, and
        the sequence starts at its last token once all has arrived. If the offer is too short for the target,
        it is left alone and the prompt is computed here.
        """
        assert not sequence.admitted
        layout = self.layout
        draft = may_draft and bool(self._draft)
        limit = len(sequence.tokens) - 1
        use_cache = use_cache and self.config.prefix_caching
        hit, views = self.search(sequence, limit if use_cache else 0, draft=draft)
        if self._observer:
            self._observer.admitting(sequence, hit, use_cache=use_cache, may_draft=draft)
        holds = [view.spec.kind.needed(hit.end, hit.tap_rows) for view in views[: layout.num_target]]
        target = self._seatings(views[: layout.num_target], holds, limit, remote)
        pulled = target is not None and remote is not None
        if target is None:
            # The peer's offer is too short for the target: compute the prompt here.
            target = self._seatings(views[: layout.num_target], holds, hit.end, None)
        drafts = self._draft_seatings(views[layout.num_target :], hit, limit, remote if pulled else None)
        assert target is not None
        # What was found must be held before anything is taken: taking may evict it.
        self._hold(target)
        self._hold(drafts)
        try:
            self.pool.require([(seat.view.group, seat.num_fresh) for seat in target])
        except OutOfPages:
            self._unhold(drafts)
            try:
                self.pool.require([(seat.view.group, seat.num_fresh) for seat in target])
            except OutOfPages:
                self._unhold(target)
                raise
            drafts = []
            self.dropped_drafts += 1
            draft = False
        for seat in target:
            self._fill(sequence, seat)
        sequence.hit = hit.end
        sequence.load_end = limit if pulled else hit.end
        if draft:
            self._admit_draft(sequence, hit, drafts)
        sequence.admitted = True
        if self._observer:
            self._observer.admitted(sequence)
        self.queried_tokens += limit
        self.hit_tokens += hit.end
        if not sequence.loads:
            self._start_at(sequence, hit.end)
        self._measure_room(sequence)
        self._assign_all(sequence)
        return Admission(hit.end, tuple(sequence.loads))

    def _admit_draft(self, sequence: SequenceKV, hit: Hit, seats: list[Seating]) -> None:
        """Draft groups take what lies next to the target's hit, or are dropped: they never delay it."""
        sequence.drafting = True
        sequence.draft_end = hit.draft[0].end
        try:
            self.pool.require([(seat.view.group, seat.num_fresh) for seat in seats])
        except OutOfPages:
            self._unhold(seats)
            self.drop_draft(sequence)
            return
        for seat in seats:
            self._fill(sequence, seat)

    def _seatings(
        self, views: list[GroupView], holds: list[Interval], end: int, remote: Mapping[int, Interval] | None
    ) -> list[Seating] | None:
        """How each group is filled: from the cache, and (to start at `end`) from a peer.

        None if the peer's offer does not cover what is needed.
        """
        seats = []
        for view, hold in zip(views, holds, strict=True):
            want = Interval(end, end)
            if remote is not None:
                offered = remote.get(view.group, Interval(0, 0))
                found = wanted(view.spec.kind, end=end, margin=self.layout.margin, held=hold, offered=offered)
                if found is None:
                    return None
                want = found
                # Of what is cached hold only what the start at `end` needs; on failure the index has the rest.
                needed = view.spec.kind.needed(end, self.layout.margin)
                hold = Interval(max(hold.start, needed.start), hold.end)
                if not want.empty and (hold.empty or want.start > hold.end):
                    hold = Interval(want.start, want.start)
            placement = place(view, hold)
            seats.append(Seating(view, placement, want))
        return seats

    def _draft_seatings(
        self, views: list[GroupView], hit: Hit, limit: int, remote: Mapping[int, Interval] | None
    ) -> list[Seating]:
        runs = list(hit.draft)
        if remote is not None:
            # A run that does not start where the need does is pulled whole rather than patched.
            patchy = any(
                run.start > view.spec.kind.needed(run.end).start
                for view, run in zip(views, runs, strict=True)
            )
            end = self._footprint.durable_end(limit) - self._lead
            held = [Interval(run.end, run.end) if patchy else run for run in runs]
            seats = self._seatings(views, held, max(end, hit.draft[0].end), remote) if views else []
            if seats is not None:
                return seats
        return [Seating(view, place(view, run), NOTHING) for view, run in zip(views, runs, strict=True)]

    def _hold(self, seats: list[Seating]) -> None:
        for seat in seats:
            self.pool.retain(seat.view.group, seat.placement.shared)
            for _, source, _ in seat.placement.copied:
                self.pool.retain_source(seat.view.group, source)

    def _unhold(self, seats: list[Seating]) -> None:
        for seat in seats:
            self.pool.release(seat.view.group, seat.placement.shared[::-1])
            for _, source, _ in seat.placement.copied:
                self.pool.release_source(seat.view.group, source)

    def _fill(self, sequence: SequenceKV, seat: Seating) -> None:
        """Put pages in place; fresh ones were required before."""
        g, size, placement = seat.view.group, seat.view.page_tokens, seat.placement
        first = placement.first_page
        spare = self.pool.acquire(g, seat.num_fresh)
        filled = [page if page is not None else spare.pop() for page in placement.pages] + spare
        if self._observer:
            for offset, page in enumerate(placement.pages):
                if page is not None:
                    self._observer.shared(sequence, g, first + offset, page, size)
            for number, source, slots in placement.copied:
                self._observer.shared(sequence, g, number, source, slots)
        for number, source, slots in placement.copied:
            self._copy_later(sequence, g, source, filled[number - first], slots)
        for load in placement.loads:
            sequence.loads[load] = LoadState.PENDING
        if not seat.pull.empty:
            sequence.loads[Load(g, seat.pull, None)] = LoadState.PENDING
        sequence.groups[g].place(first, filled, low=placement.low, published=placement.published)

    def _copy_later(
        self, sequence: SequenceKV, g: int, source: int, destination: int, stop: int, first: int = 0
    ) -> None:
        """The next plan copies; its source, which the caller holds, is let go when that step completes."""
        self._copies.append(PageCopy(g, source, destination, first, stop))
        self._copy_sources.append((g, source))
        sequence.copy_step = NEVER
        self._copying.append(sequence)

    def _assign_all(self, sequence: SequenceKV) -> None:
        for g, state in enumerate(sequence.groups):
            if state.pages:
                self._assignments.append(PageAssignment(sequence.id, g, 0, tuple(state.pages), state.low))

    # ---- loads -------------------------------------------------------------------------------------

    def import_interval(self, sequence: SequenceKV, load: Load) -> None:
        """These slots have arrived and were confirmed. A second notice of the same load changes nothing."""
        if sequence.loads.get(load) is not LoadState.PENDING:
            return
        if self._observer:
            self._observer.imported(sequence, load.group, load.interval)
        sequence.loads[load] = LoadState.ARRIVED

    def copies_outstanding(self, sequence: SequenceKV) -> bool:
        """Does a page of the sequence still wait for its copy? Until then nothing of it may be published."""
        return sequence.copy_step > self.pool.last_completed

    def fail_load(self, sequence: SequenceKV, load: Load) -> None:
        """These slots will not arrive, and nothing writes to their pages any more."""
        if sequence.loads.get(load) is LoadState.PENDING:
            sequence.loads[load] = LoadState.FAILED

    def finish_loading(self, sequence: SequenceKV) -> int:
        """Every load has arrived or failed: start at the longest end whose needs are all here.

        Draft groups never hold the target back: what did not arrive is rebuilt, or stays out below `low`.
        """
        assert not sequence.loading and not self.copies_outstanding(sequence)
        layout, loads = self.layout, sequence.loads
        held = [self._loaded_parts(sequence, g, sequence.hit) for g in layout.target_groups]
        limit = first_failure(loads, layout.target_groups, sequence.load_end)
        end = longest_held([layout.groups[g].kind for g in layout.target_groups], held, limit)
        if sequence.drafting:
            self._settle_draft(sequence, end)
        for (g, size), parts in zip(self._target, held, strict=True):
            self._keep_run(sequence, g, size, parts, end)
        loads.clear()
        self._start_at(sequence, end)
        self._assign_all(sequence)
        return end

    def _loaded_parts(self, sequence: SequenceKV, g: int, local_end: int) -> list[Interval]:
        """What is held of a group once its loads have ended: the hit without failed pages, and what a peer sent."""
        loads = sequence.loads
        failed = [load.interval for load, s in loads.items() if load.group == g and s is LoadState.FAILED]
        local = Interval(sequence.groups[g].low, local_end)
        return [*subtract(local, failed), *arrived_parts(loads, g)]

    def _settle_draft(self, sequence: SequenceKV, end: int) -> None:
        """Decide what the draft groups hold at the start `end`."""
        footprint, local_end = self._footprint, sequence.draft_end
        groups = self.layout.draft_groups
        pulled = any(load.group in groups and load.key is None for load in sequence.loads)
        parts = [self._loaded_parts(sequence, g, local_end) for g in groups]
        reachable = min(end, footprint.durable_end(end))
        if footprint.rebuild:
            draft_end = longest_held([self.layout.groups[g].kind for g in groups], parts, reachable)
        elif end == sequence.hit and not pulled:
            draft_end = local_end  # tap rows feed the rest
        else:
            draft_end = reachable
        sequence.draft_end = draft_end
        for (g, size), held in zip(self._draft, parts, strict=True):
            self._keep_run(sequence, g, size, held, draft_end)

    def _keep_run(self, sequence: SequenceKV, g: int, size: int, parts: Sequence[Interval], end: int) -> None:
        """Of what is held keep the run that stops at `end`, if there is one."""
        low = run_start(parts, end)
        if low < end:
            self._cut(sequence, g, end)
            sequence.groups[g].low = low
        else:
            self._start_empty(sequence, g, size, end)

    def _start_empty(self, sequence: SequenceKV, g: int, size: int, low: int) -> None:
        """Hold nothing in this group; what comes next is written from `low` on."""
        state = sequence.groups[g]
        self._give_back(g, state.held())
        state.place(low // size, (), low=low, published=page_count(low, size))

    def abandon_loading(self, sequence: SequenceKV) -> list[tuple[int, list[int]]]:
        """A transfer is lost in mid-flight: set its pages aside, and hold nothing.

        Returns (group, pages) to restore once the transfer's handle is destroyed.
        """
        aside: list[tuple[int, list[int]]] = []
        for load, load_state in sequence.loads.items():
            if load_state is LoadState.PENDING:
                state, size = sequence.groups[load.group], self.layout.groups[load.group].page_tokens
                numbers = range(load.interval.start // size, page_count(load.interval.end, size))
                pages = [state.pages[number] for number in numbers]
                self.pool.quarantine(load.group, pages)
                aside.append((load.group, pages))
                for number in numbers:
                    state.pages[number] = SINK
        self._return_all(sequence)
        return aside

    def restore_quarantined(self, aside: list[tuple[int, list[int]]]) -> None:
        for g, pages in aside:
            self.pool.restore(g, pages)

    def export_intervals(self, sequence: SequenceKV) -> dict[int, Interval]:
        """The durable slots that may leave this worker, per group. Scratch is never among them."""
        out: dict[int, Interval] = {}
        for g, size in self._held_groups(sequence):
            state = sequence.groups[g]
            end = min(sequence.committed, self._durable_end(sequence, g))
            out[g] = Interval(max(state.low, state.first_page * size), end)
        return out

    # ---- one step ----------------------------------------------------------------------------------

    def reserve(self, sequence: SequenceKV, target_end: int, draft_end: int) -> None:
        """Hold pages for the target to target_end and for the drafter to draft_end. All or nothing.

        Raises OutOfPages if the target's pages are not to be had. If only the drafter's are not, its groups
        are dropped and `sequence.drafting` turns False.
        """
        if target_end <= sequence.target_room and draft_end <= sequence.draft_room:
            return
        missing = self._missing(sequence, self._target, target_end)
        if missing:
            self.pool.require(missing)
        if sequence.drafting:
            draft_missing = self._missing(sequence, self._draft, draft_end)
            if draft_missing:
                try:
                    self.pool.require(missing + draft_missing)
                    missing += draft_missing
                except OutOfPages:
                    self.drop_draft(sequence)
        for g, count in missing:
            state = sequence.groups[g]
            pages = self.pool.acquire(g, count)
            self._assignments.append(
                PageAssignment(sequence.id, g, len(state.pages), tuple(pages), state.low)
            )
            state.pages += pages
        self._measure_room(sequence)

    def _missing(
        self, sequence: SequenceKV, groups: list[tuple[int, int]], end: int
    ) -> list[tuple[int, int]]:
        missing = []
        for g, size in groups:
            count = -(-end // size) - len(sequence.groups[g].pages)
            if count > 0:
                missing.append((g, count))
        return missing

    def has_room(self, sequence: SequenceKV, length: int) -> bool:
        """Could the target's pages for a sequence of this length be had now?"""
        missing = []
        for g, size in self._target:
            kind = self.layout.groups[g].kind
            resident = kind.resident_tokens(length, self.config.step_tokens, self.layout.margin)
            held = len(sequence.groups[g].pages) - sequence.groups[g].first_page
            missing.append((g, max(0, page_count(resident, size) - held)))
        try:
            self.pool.require(missing)
        except OutOfPages:
            return False
        return True

    def commit(
        self,
        sequence: SequenceKV,
        v: int,
        *,
        fed_to: int | None = None,
        ahead: int = 0,
        keep_window: bool = False,
    ) -> None:
        """The target is durable up to v. Publish what that completes, free what nobody will read.

        fed_to: where a drafter that is catching up got to, if not to durable_end(v). ahead: rows that a
        later plan already counts on. keep_window: somebody is about to fork from here.
        """
        sequence.committed = v
        if sequence.drafting:
            sequence.draft_end = self._footprint.durable_end(v) if fed_to is None else fed_to
        if self._observer:
            self._observer.committing(sequence)
        if v >= sequence.next_event:
            self._advance(sequence, margin=self._footprint.token_reach if keep_window else 0)
        v += ahead
        if (
            v + sequence.target_headroom <= sequence.target_last_page_start
            or v + sequence.draft_headroom <= sequence.draft_last_page_start
        ):
            self._trim(sequence, v)

    def _advance(self, sequence: SequenceKV, *, margin: int) -> None:
        """A page was completed, or left its window. `margin`: positions before the end that tap rows will query."""
        self.publish(sequence)
        self._free_behind(sequence, max(margin, self.config.keep_margin))
        self._next_event(sequence)

    def publish(self, sequence: SequenceKV) -> None:
        """Enter every page into the index that is full, durable, and worth keeping."""
        if not self.config.prefix_caching:
            return
        for g, size in self._held_groups(sequence):
            if self._durable_end(sequence, g) >= (sequence.groups[g].published + 1) * size:
                self._publish_group(sequence, g, size, self._durable_end(sequence, g) // size)

    def _publish_group(self, sequence: SequenceKV, g: int, size: int, stop: int) -> None:
        """Publish pages [state.published, stop) of one group."""
        state, layout, chain = sequence.groups[g], self.layout, sequence.chain
        first = max(state.published, state.first_page)
        state.published = stop
        if g >= layout.num_target and self._fed_above_gap(sequence, g):
            return
        reach, pages = layout.reach[g], state.pages
        known, in_index = self.pool.indexes[g].pages, self.pool.arena(g).published
        chain.extend(sequence.tokens, stop * size)
        step = size // layout.grain
        bases = chain.bases[first * step : stop * step + 1 : step]
        data = sequence.tokens[first * size : stop * size + reach].tobytes()
        stride, width = size * TOKEN_BYTES, (size + reach) * TOKEN_BYTES
        skims, media, offset = not layout.retains_all[g], chain.media, 0
        entries = []
        for number in range(first, stop):
            content = data[offset : offset + width]
            key = bases[number - first + 1]
            if reach:
                key += content[stride:]
            offset += stride
            page = pages[number]
            if key in known or in_index[page] or (skims and not layout.retains(g, number)):
                if self._observer and key in known:
                    self._observer.already_published(sequence, g, number, known[key])
                continue
            if media and chain.has_media(number * size, (number + 1) * size + reach):
                content = b""
            entries.append((content, page, key, bases[number - first]))
            if self._observer:
                self._observer.published(sequence, g, number, page, key)
        self.pool.publish(g, entries)
        if self._observer:
            self._observer.offered(sequence, g, first, stop)

    def _fed_above_gap(self, sequence: SequenceKV, g: int) -> bool:
        """A drafter that reads its own KV while feeding wrote something else than its key would say."""
        low = sequence.groups[g].low
        return self._footprint.feed_reads_kv and not self._footprint.rebuild and low > 0

    def _free_behind(self, sequence: SequenceKV, margin: int) -> None:
        """Give back pages that no query at or after the committed end, less the margin, reads."""
        for g, size in self._held_groups(sequence):
            state = sequence.groups[g]
            end = min(sequence.committed, self._durable_end(sequence, g))
            needed = self.layout.groups[g].kind.needed(end, margin)
            stop = min(needed.start // size, len(state.pages))
            if stop > state.first_page:
                freed = state.pages[state.first_page : stop]
                state.pages[state.first_page : stop] = [SINK] * len(freed)
                state.first_page = stop
                self._give_back(g, freed)

    def _next_event(self, sequence: SequenceKV) -> None:
        """The first committed end at which a page completes or leaves a window."""
        event = NEVER
        for g, size in self._held_groups(sequence):
            state = sequence.groups[g]
            if self.config.prefix_caching:
                lead = 0 if g < self.layout.num_target else self._lead
                event = min(event, (state.published + 1) * size - lead)
            freed_at = self.layout.groups[g].kind.freed_at((state.first_page + 1) * size)
            if freed_at is not None:
                event = min(event, freed_at + self.config.keep_margin)
        sequence.next_event = event

    def _trim(self, sequence: SequenceKV, v: int) -> None:
        """Give back pages past what the next step of the same shape will ask for."""
        for g, size in self._target:
            self._cut(sequence, g, v + sequence.target_headroom)
        for g, size in self._draft if sequence.drafting else ():
            self._cut(sequence, g, v + sequence.draft_headroom)
        self._measure_room(sequence)

    def rewind(self, sequence: SequenceKV, end: int) -> None:
        """Forget everything at and past `end`. A page that others read is copied before it is rewritten."""
        assert end <= sequence.committed and not sequence.loads
        sequence.committed = end
        sequence.draft_end = min(sequence.draft_end, self._footprint.durable_end(end))
        for g, size in self._held_groups(sequence):
            keep = self._durable_end(sequence, g)
            self._cut(sequence, g, keep)
            self._own_last_page(sequence, g, size, keep)
            sequence.groups[g].published = min(sequence.groups[g].published, keep // size)
        sequence.chain.truncate(end)
        self._measure_room(sequence)
        self._next_event(sequence)

    def _own_last_page(self, sequence: SequenceKV, g: int, size: int, end: int) -> None:
        state, arena = sequence.groups[g], self.pool.arena(g)
        number = end // size
        if end % size == 0 or not state.first_page <= number < len(state.pages):
            return
        page = state.pages[number]
        if arena.refs[page] == 1 and not arena.published[page]:
            return
        (fresh,) = self.pool.acquire(g, 1)
        self.pool.retain_source(g, page)
        self._copy_later(sequence, g, page, fresh, end - number * size, max(0, state.low - number * size))
        state.pages[number] = fresh
        self.pool.release(g, [page])
        self._assignments.append(PageAssignment(sequence.id, g, number, (fresh,), state.low))

    # ---- forks -------------------------------------------------------------------------------------

    def fork(self, parent: SequenceKV, child: SequenceKV) -> None:
        """Start `child` at the parent's committed end with the parent's pages.

        Whole pages are shared. The page that both would write to is copied. Draft slots that reach past the
        end depend on a token that differs between forks: tap rows of the child's first step feed them.
        """
        assert not child.admitted and parent.admitted
        end = parent.committed
        self._fork_groups(parent, child, self._target, end)
        child.admitted = True
        child.hit = child.load_end = end
        if parent.drafting:
            child.drafting = True
            child.draft_end = min(end - self._footprint.token_reach, parent.draft_end)
            try:
                self._fork_groups(parent, child, self._draft, child.draft_end)
            except OutOfPages:
                self.drop_draft(child)
        self._start_at(child, end)
        self._assign_all(child)

    def _fork_groups(
        self, parent: SequenceKV, child: SequenceKV, groups: list[tuple[int, int]], end: int
    ) -> None:
        partial = [g for g, size in groups if end % size and parent.groups[g].low < end]
        self.pool.require([(g, 1) for g in partial])
        for g, size in groups:
            state, whole = parent.groups[g], end // size
            pages = state.pages[state.first_page : whole]
            self.pool.retain(g, pages)
            if g in partial:
                source = state.pages[whole]
                self.pool.retain_source(g, source)
                (fresh,) = self.pool.acquire(g, 1)
                self._copy_later(
                    child, g, source, fresh, end - whole * size, max(0, state.low - whole * size)
                )
                pages = [*pages, fresh]
            first = min(state.first_page, whole)
            low = min(state.low, end)
            published = max(first, min(whole, state.published), page_count(low, size))
            child.groups[g].place(first, pages, low=low, published=published)

    # ---- letting go --------------------------------------------------------------------------------

    def drop_draft(self, sequence: SequenceKV) -> None:
        """Give up the draft groups until the sequence is admitted again. Target work goes on."""
        for g, _size in self._draft:
            self._give_back(g, sequence.groups[g].held())
            sequence.groups[g] = GroupPages()
        for load in [load for load in sequence.loads if load.group in self.layout.draft_groups]:
            del sequence.loads[load]
        sequence.drafting = False
        self.dropped_drafts += 1
        self._measure_room(sequence)

    def release(self, sequence: SequenceKV) -> None:
        """The sequence holds nothing any more; it may be admitted again."""
        if sequence.admitted:
            self._return_all(sequence)

    def close(self, sequence: SequenceKV) -> None:
        """The sequence is gone."""
        self.release(sequence)
        self._forgotten.append(sequence.id)
        del self.sequences[sequence.id]

    def _return_all(self, sequence: SequenceKV) -> None:
        for g, state in enumerate(sequence.groups):
            self._give_back(g, state.held())
        sequence.reset(len(self.layout.groups))
        if self._observer:
            self._observer.ended(sequence)

    def _give_back(self, g: int, pages: Sequence[int]) -> None:
        """Let go of pages of one group; those nearest the end are evicted first."""
        held = [page for page in reversed(pages) if page != SINK]
        if self._copies and held:
            # A copy that no plan has taken must not land in a page that is somebody else's by then.
            arena_of, arena = self.layout.arena_of, self.layout.arena_of[g]
            gone = set(held)
            self._copies = [
                copy for copy in self._copies if arena_of[copy.group] != arena or copy.destination not in gone
            ]
        self.pool.release(g, held)

    def _cut(self, sequence: SequenceKV, g: int, end: int) -> None:
        """Hold nothing past the page of position end - 1."""
        state = sequence.groups[g]
        keep = max(page_count(end, self.layout.groups[g].page_tokens), state.first_page)
        if keep < len(state.pages):
            self._give_back(g, state.pages[keep:])
            del state.pages[keep:]

    def reset_cache(self) -> None:
        self.pool.reset_cache()

    # ---- plans -------------------------------------------------------------------------------------

    def take_plan(self, step: int) -> KVPlan:
        """Everything that changed since the last plan; from now on `step` is in flight."""
        plan = KVPlan(
            step=step,
            assignments=tuple(self._assignments),
            copies=tuple(self._copies),
            forgotten=tuple(self._forgotten),
        )
        self.pool.begin(step)
        for g, page in self._copy_sources:
            self.pool.release_source(g, page)  # deferred: this very step still reads it
        for sequence in self._copying:
            if sequence.copy_step == NEVER:
                sequence.copy_step = step
        self._assignments, self._copies, self._copy_sources = [], [], []
        self._copying, self._forgotten = [], []
        return plan

    def complete(self, step: int) -> None:
        """The step has run: what it could touch may be reused."""
        self.pool.complete(step)

    def _start_at(self, sequence: SequenceKV, end: int) -> None:
        sequence.committed = end
        self._advance(sequence, margin=self._footprint.token_reach)
        self._measure_room(sequence)

    def _measure_room(self, sequence: SequenceKV) -> None:
        """How far each owner's pages reach, and where its last page starts."""
        groups = sequence.groups
        room, last = NEVER, -1
        for g, size in self._target:
            end = len(groups[g].pages) * size
            room, last = min(room, end), max(last, end - size)
        sequence.target_room, sequence.target_last_page_start = room, last
        room, last = NEVER, -1
        if sequence.drafting:
            for g, size in self._draft:
                end = len(groups[g].pages) * size
                room, last = min(room, end), max(last, end - size)
        sequence.draft_room, sequence.draft_last_page_start = room, last

    def count_references(self) -> list[list[int]]:
        """Per arena and page: how many holders the ledger knows of."""
        refs = [[0] * arena.num_pages for arena in self.pool.arenas]
        for sequence in self.sequences.values():
            for g, state in enumerate(sequence.groups):
                for page in state.held():
                    refs[self.layout.arena_of[g]][page] += 1
        for arena_index, page in self.pool.pending():
            refs[arena_index][page] += 1
        for g, page in self._copy_sources:
            refs[self.layout.arena_of[g]][page] += 1
        for counted in refs:
            counted[SINK] = 1
        return refs

    def check_integrity(self) -> None:
        """Arenas and ledger agree about every reference."""
        for arena, counted in zip(self.pool.arenas, self.count_references(), strict=True):
            arena.check_integrity()
            assert counted == arena.refs, f"arena {arena.index}: ledger and reference counts disagree"
