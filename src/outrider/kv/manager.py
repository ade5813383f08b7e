"""The KV manager: the rules by which sequences come to hold slots and lose them. `holdings` carries the moves out.

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
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from outrider.errors import OutOfPages, RequestError
from outrider.kv.admission import GroupAllocation, Offered, allocate_draft, allocate_target, find_hit, shared_end
from outrider.kv.holdings import NEVER, GroupSizes, Holdings
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import GroupPages, Load, LoadState, SequenceKV
from outrider.kv.loading import first_failure, loaded_parts, longest_held, run_start
from outrider.kv.observer import Hit, IndexListener, KVObserver
from outrider.kv.plan import KVPlan
from outrider.kv.pool import PagePool
from outrider.kv.prefix import Chain, KnownRuns, Media, Tier
from outrider.kv.progress import Progress
from outrider.kv.retention import DENSE, RetentionMask
from outrider.kv.search import GroupView
from outrider.kv.sizing import Sizing, resident_pages

ROOTS_MAX = 1024


class Admission(NamedTuple):
    """What an admitted sequence starts with: its hit, and the loads it waits for."""

    hit: int
    loads: tuple[Load, ...]


class KVManager:
    def __init__(
        self,
        layout: KVLayout,
        config: KVConfig,
        *,
        observer: KVObserver | None = None,
        tiers: Sequence[Tier] = (),
        listener: IndexListener | None = None,
    ) -> None:
        self.layout = layout
        self.config = config
        self.tiers = tiers
        self.pool = PagePool(layout, config.arena_pages, observer, listener)
        self.holdings = Holdings(layout, self.pool, observer)
        self.sequences: dict[str, SequenceKV] = {}
        self.dropped_drafts = 0
        self.hit_tokens = 0
        self.queried_tokens = 0
        self._observer = observer
        self.mask = RetentionMask(layout, config.retention if config.prefix_caching else DENSE)
        self.progress = Progress(layout, config, self.mask, self.holdings, observer, notes_new_pages=bool(tiers))
        self._sizing = Sizing(layout, config)
        self._footprint = layout.footprint
        self._durable_lead, self._drafter_limit = self._footprint.durable_lead, self._footprint.max_len or NEVER
        self._slides = any(spec.kind.slides for spec in layout.groups)
        """Whether some group frees pages before its sequence ends, so that ends have to be marked to be kept."""
        # Clients choose salts, so the number of roots is bounded.
        self._root = lru_cache(ROOTS_MAX)(config.identity.root)
        self._known_runs = KnownRuns()

    # ---- opening and admission ---------------------------------------------------------------------

    def open(
        self,
        id: str,
        tokens: array[int],
        *,
        total_tokens: int,
        label: str | None = None,
        k: int = 0,
        adapter: str = "",
        salt: str = "",
        media: tuple[Media, ...] = (),
    ) -> SequenceKV:
        """Enter a sequence that will grow to at most total_tokens. It holds nothing until admitted.

        `label` is what an error calls the sequence's request, where that is not `id`.
        """
        label = id if label is None else label
        if id in self.sequences:
            raise RequestError(f"request id {label!r} is in use; choose another")
        self._sizing.check(label, total_tokens, k)
        chain = Chain(self._root(adapter=adapter, salt=salt), self.layout.grain, media, self._known_runs)
        sequence = SequenceKV(id, tokens, chain, len(self.layout.groups), (adapter, salt))
        sequence.target_headroom = ahead = self.config.steps_ahead * (1 + k)
        sequence.headrooms = (self.config.steps_ahead, ahead)
        sequence.draft_headroom = ahead + self._footprint.scratch_ahead(k) + self._footprint.durable_lead
        self.sequences[id] = sequence
        return sequence

    def clear_counts(self) -> None:
        """Counts hits and lost draft groups from zero."""
        self.dropped_drafts = self.hit_tokens = self.queried_tokens = 0

    def draft_fits(self, total_tokens: int, k: int) -> bool:
        """Whether a sequence of this length, running alone, could hold its draft groups beside its target groups."""
        return total_tokens <= self._sizing.longest(k, draft=True)

    def search(self, sequence: SequenceKV, limit: int, *, draft: bool) -> tuple[Hit, list[GroupView]]:
        """Returns the hit of this sequence on the cache as it is now, and the views it comes from. Changes nothing."""
        layout, chain, tokens = self.layout, sequence.chain, sequence.tokens
        chain.extend(tokens, len(tokens))
        tiers = () if sequence.skip_tiers else self.tiers
        if tiers and sequence.found is not None:
            tiers = (*tiers, sequence.found)
        views = [
            GroupView(g, layout.groups[g], layout.reach[g], self.pool.indexes[g], chain, tokens, tiers)
            for g in range(len(layout.groups) if draft else layout.num_target)
        ]
        return find_hit(views, layout.num_target, self._footprint, limit, draft=draft), views

    def admit(
        self,
        sequence: SequenceKV,
        *,
        use_cache: bool = True,
        may_draft: bool = True,
        remote: Offered | None = None,
    ) -> Admission:
        """Take everything the cache has for this sequence; raise OutOfPages, holding nothing, if it cannot.

        With `remote`, a peer holds those intervals per group. Pages for what is missing here are taken too, and
        the sequence starts at its last token once all has arrived. If the offer is too short for the target,
        it is ignored and the prompt is computed here.
        """
        assert not sequence.admitted
        layout, holdings = self.layout, self.holdings
        draft = may_draft and bool(holdings.draft)
        limit = len(sequence.tokens) - 1
        use_cache = use_cache and self.config.prefix_caching
        hit, views = self.search(sequence, limit if use_cache else 0, draft=draft)
        if self._observer:
            self._observer.admitting(sequence, hit, use_cache=use_cache, may_draft=draft)
        if self._slides:
            shared = shared_end(views[: layout.num_target], limit if use_cache else 0)
            sequence.marks = self.mask.marks(len(sequence.tokens), shared)
        target, pulled = allocate_target(views[: layout.num_target], hit, limit, layout.margin, remote)
        draft_end = self._footprint.durable_end(limit) - self._footprint.durable_lead
        offered = remote if pulled else None
        drafts = allocate_draft(views[layout.num_target :], hit, draft_end, layout.margin, offered)
        holdings.hold(target)
        holdings.hold(drafts)
        draft = self._require_target_pages(target, drafts) and draft
        for allocation in target:
            holdings.fill(sequence, allocation)
        sequence.hit = hit.end
        sequence.load_end = limit if pulled else hit.end
        sequence.target_headroom = sequence.headrooms[draft or not holdings.draft]
        if draft:
            self._admit_draft(sequence, hit, drafts)
        sequence.admitted = True
        if self._observer:
            self._observer.admitted(sequence)
        self.queried_tokens += limit
        self.hit_tokens += hit.end
        if sequence.loads:
            holdings.measure_room(sequence)
        else:
            self._start_at(sequence, hit.end)
        holdings.assign_all(sequence)
        return Admission(hit.end, tuple(sequence.loads))

    def _require_target_pages(self, target: list[GroupAllocation], drafts: list[GroupAllocation]) -> bool:
        """Make sure of the target's pages; if they are short, give up the drafter's and return False."""
        try:
            self.holdings.require(target)
            return True
        except OutOfPages:
            self.holdings.let_go(drafts)
        try:
            self.holdings.require(target)
        except OutOfPages:
            self.holdings.let_go(target)
            raise
        self.dropped_drafts += bool(drafts)
        return False

    def _admit_draft(self, sequence: SequenceKV, hit: Hit, allocations: list[GroupAllocation]) -> None:
        """Fill the draft groups with what lies next to the target's hit, or drop them: they never delay it."""
        sequence.drafting = True
        sequence.draft_end = hit.draft[0].end
        try:
            self.holdings.require(allocations)
        except OutOfPages:
            self.holdings.let_go(allocations)
            self.drop_draft(sequence)
            return
        for allocation in allocations:
            self.holdings.fill(sequence, allocation)

    def _start_at(self, sequence: SequenceKV, end: int) -> None:
        """Let work go on at `end`; tap rows of the first step may start earlier by the reach."""
        sequence.committed = end
        self.progress.advance(sequence, margin=self._footprint.token_reach)
        self.holdings.measure_room(sequence)
        if self._observer:
            self._observer.committed(sequence)

    # ---- loads -------------------------------------------------------------------------------------

    def import_interval(self, sequence: SequenceKV, load: Load) -> None:
        """Note that these slots have arrived and were confirmed. A second notice of the same load changes nothing."""
        if sequence.loads.get(load) is not LoadState.PENDING:
            return
        if self._observer:
            self._observer.imported(sequence, load.group, load.interval)
        sequence.loads[load] = LoadState.ARRIVED

    def fail_load(self, sequence: SequenceKV, load: Load) -> None:
        """Note that these slots will not arrive, and that nothing writes to their pages any more."""
        if sequence.loads.get(load) is LoadState.PENDING:
            sequence.loads[load] = LoadState.FAILED
            sequence.skip_tiers |= load.key is not None

    def may_finish_loading(self, sequence: SequenceKV) -> bool:
        """Whether every load has ended and every page copy has run."""
        return not sequence.loading and not self.holdings.copies_outstanding(sequence)

    def finish_loading(self, sequence: SequenceKV) -> int:
        """Start the sequence, whose loads have all arrived or failed, at the longest end whose needs are held.

        Draft groups never hold the target back: slots that did not arrive are rebuilt, or stay invalid below `low`.
        """
        assert self.may_finish_loading(sequence)
        layout, loads = self.layout, sequence.loads
        parts = self._loaded(sequence, layout.target_groups, sequence.hit)
        limit = first_failure(loads, layout.target_groups, sequence.load_end)
        kinds = [layout.groups[g].kind for g in layout.target_groups]
        end = longest_held(kinds, parts, limit)
        if sequence.drafting:
            gap = max(0, end - sequence.draft_end)
            fed_by_taps = all(
                run_start(p, end) <= kind.needed(end, gap).start for kind, p in zip(kinds, parts, strict=True)
            )
            self._settle_draft(sequence, end, fed_by_taps=fed_by_taps)
        for (g, size), held in zip(self.holdings.target, parts, strict=True):
            self.holdings.keep_run(sequence, g, size, held, end)
        loads.clear()
        self._start_at(sequence, end)
        self.holdings.assign_all(sequence)
        return end

    def _loaded(self, sequence: SequenceKV, groups: range, cached_end: int) -> list[list[Interval]]:
        return [loaded_parts(sequence.loads, g, Interval(sequence.groups[g].low, cached_end)) for g in groups]

    def _settle_draft(self, sequence: SequenceKV, end: int, *, fed_by_taps: bool) -> None:
        """Decide what the draft groups hold at the start `end`; fed_by_taps: tap rows could read what they need."""
        footprint, groups = self._footprint, self.layout.draft_groups
        pulled = any(load.group in groups and load.key is None for load in sequence.loads)
        parts = self._loaded(sequence, groups, sequence.draft_end)
        reachable = min(end, footprint.durable_end(end))
        if footprint.rebuild:
            sequence.draft_end = self._writable_end(sequence, parts, reachable)
        elif pulled or end != sequence.hit or not fed_by_taps:
            sequence.draft_end = reachable
        # Otherwise it stays where the hit left it, and tap rows feed the rest.
        for (g, size), held in zip(self.holdings.draft, parts, strict=True):
            self.holdings.keep_run(sequence, g, size, held, sequence.draft_end)

    def _writable_end(self, sequence: SequenceKV, parts: Sequence[Sequence[Interval]], limit: int) -> int:
        """Returns the longest end, at most `limit`, at which the draft groups hold what they need and from which they
        can be fed: no group may have to write to a page there that other sequences or the index read."""
        kinds = [self.layout.groups[g].kind for g in self.layout.draft_groups]
        end = longest_held(kinds, parts, limit)
        for g, size in self.holdings.draft:
            if end % size and self.holdings.is_read_elsewhere(sequence, g, end // size):
                return self._writable_end(sequence, parts, end // size * size)
        return end

    def abandon_loading(self, sequence: SequenceKV) -> list[tuple[int, list[int]]]:
        """Give up a transfer that is lost in mid-flight: put its pages aside, and release all others.

        Returns (group, pages) to restore once the transfer's handle is destroyed.
        """
        aside = self.holdings.set_pending_aside(sequence)
        sequence.skip_tiers = True
        self.holdings.return_all(sequence)
        return aside

    def abandon_draft_loads(self, sequence: SequenceKV) -> list[tuple[int, list[int]]]:
        """Give up a transfer for which only draft groups still wait: they are dropped, and nothing is recomputed."""
        aside = self.holdings.set_pending_aside(sequence)
        self.drop_draft(sequence)
        return aside

    def restore_quarantined(self, aside: list[tuple[int, list[int]]]) -> None:
        for g, pages in aside:
            self.pool.restore(g, pages)

    def export_intervals(self, sequence: SequenceKV) -> dict[int, Interval]:
        """Returns the durable slots that may leave this worker, per group. Scratch is never among them."""
        out: dict[int, Interval] = {}
        for g, size in self.holdings.groups(sequence):
            start = sequence.groups[g].held_from(size)
            out[g] = Interval(start, max(start, min(sequence.committed, self.progress.durable_end(sequence, g))))
        return out

    # ---- one step ----------------------------------------------------------------------------------

    def reserve(self, sequence: SequenceKV, target_end: int, draft_end: int) -> None:
        """Hold pages for the target to target_end and for the drafter to draft_end. All or nothing.

        Raises OutOfPages if there are too few pages for the target. If there are too few for the drafter only, its
        groups are dropped and `sequence.drafting` turns False.
        """
        if target_end <= sequence.target_room and draft_end <= sequence.draft_room:
            return
        holdings, missing = self.holdings, []
        if target_end > sequence.target_room:
            missing = holdings.missing(sequence, holdings.target, target_end)
        if draft_end > sequence.draft_room:
            draft_missing = holdings.missing(sequence, holdings.draft, draft_end)
            try:
                self.pool.require(missing + draft_missing)
                missing += draft_missing
            except OutOfPages:
                self.pool.require(missing)
                self.drop_draft(sequence)
        elif len(missing) > 1:
            self.pool.require(missing)  # one group alone takes all or nothing by itself
        holdings.grow(sequence, missing)

    def has_room(self, sequence: SequenceKV, length: int) -> bool:
        """Whether there are enough target pages now for a sequence of this length."""
        return self.holdings.could_hold(sequence, resident_pages(self.layout, self.config, length))

    def commit(
        self,
        sequence: SequenceKV,
        v: int,
        *,
        fed_to: int | None = None,
        ahead: int = 0,
        keep_window: bool = False,
    ) -> None:
        """Make the target durable up to v; publish the pages that this completes, free those that no row will read.

        fed_to: where a drafter that is catching up got to, if not to durable_end(v). ahead: rows that a
        later plan already counts on. keep_window: a fork is about to start here.
        """
        sequence.committed = v
        if sequence.drafting:
            # Nearly every step comes through here, so footprint.durable_end(v) is written out.
            end = v + self._durable_lead if fed_to is None else fed_to
            sequence.draft_end = end if end < self._drafter_limit else self._drafter_limit
        if self._observer:
            self._observer.committing(sequence)
        if v >= sequence.next_event:
            self.progress.advance(sequence, margin=self._footprint.token_reach if keep_window else 0)
        if v + ahead <= sequence.surplus_until:
            self.progress.trim(sequence, v + ahead)
        if self._observer:
            self._observer.committed(sequence)

    # ---- forks -------------------------------------------------------------------------------------

    def fork(self, parent: SequenceKV, child: SequenceKV) -> None:
        """Start `child` at the parent's committed end with the parent's pages.

        Whole pages are shared. The page that both would write to is copied. Draft slots that reach past the
        end depend on a token that differs between forks: tap rows of the child's first step feed them.
        """
        assert not child.admitted and parent.admitted
        assert not self.holdings.copies_outstanding(parent), "a page that waits for its copy cannot be copied on"
        end = parent.committed
        self._fork_groups(parent, child, self.holdings.target, end)
        child.admitted = True
        child.hit = child.load_end = end
        child.marks = parent.marks
        if self._observer:
            self._observer.forked(parent, child)
        child.target_headroom = parent.target_headroom
        if parent.drafting:
            child.drafting = True
            self._fork_draft(parent, child, end)
        self._start_at(child, end)
        self.holdings.assign_all(child)

    def _fork_draft(self, parent: SequenceKV, child: SequenceKV, end: int) -> None:
        reach, holdings, kinds = self._footprint.token_reach, self.holdings, self.layout.groups
        tap_rows_possible = all(
            parent.groups[g].held_from(size) <= kinds[g].kind.needed(end, reach).start for g, size in holdings.target
        )
        if not tap_rows_possible:
            # A window has moved on (see commit's keep_window): the drafter starts anew at the end.
            child.draft_end = self._footprint.durable_end(end) - self._footprint.durable_lead
            for g, size in holdings.draft:
                holdings.keep_run(child, g, size, (), child.draft_end)
            return
        child.draft_end = min(end - reach, parent.draft_end)
        try:
            self._fork_groups(parent, child, holdings.draft, child.draft_end)
        except OutOfPages:
            self.drop_draft(child)

    def _fork_groups(self, parent: SequenceKV, child: SequenceKV, groups: GroupSizes, end: int) -> None:
        self.holdings.share_pages(parent, child, groups, end)

    # ---- letting go --------------------------------------------------------------------------------

    def drop_draft(self, sequence: SequenceKV) -> None:
        """Give up the draft groups until the sequence is admitted again. Target work goes on."""
        for g, _size in self.holdings.draft:
            self.holdings.give_back(g, sequence.groups[g].held())
            sequence.groups[g] = GroupPages()
        for load in [load for load in sequence.loads if load.group in self.layout.draft_groups]:
            del sequence.loads[load]
        sequence.drafting, sequence.target_headroom = False, sequence.headrooms[False]
        self.dropped_drafts += 1
        self.holdings.measure_room(sequence)

    def release(self, sequence: SequenceKV, *, keep_end: bool = True) -> None:
        """Release everything that the sequence holds; it may be admitted again.

        keep_end: keep what a hit at its end needs; False if it is not known what its last step wrote.
        """
        if sequence.admitted:
            if keep_end:
                self.progress.publish_end(sequence)
            self.holdings.return_all(sequence)

    def close(self, sequence: SequenceKV, *, keep_end: bool = True) -> None:
        """Release everything that the sequence holds and remove it from the ledger."""
        self.release(sequence, keep_end=keep_end)
        self.holdings.forget(sequence)
        del self.sequences[sequence.id]

    def reset_cache(self) -> None:
        self.pool.reset_cache()

    # ---- plans -------------------------------------------------------------------------------------

    def take_plan(self, step: int) -> KVPlan:
        """Returns everything that changed since the last plan; from now on `step` is in flight."""
        return self.holdings.take_plan(step)

    def complete(self, step: int) -> None:
        self.pool.complete(step)

    def count_references(self) -> list[list[int]]:
        """Returns the number of holders that the ledger knows of, per arena and page."""
        return self.holdings.count_references(list(self.sequences.values()))

    def check_integrity(self) -> None:
        """Assert that arenas and ledger agree about every reference."""
        self.holdings.check_integrity(list(self.sequences.values()))
