"""Tiny layouts, a KV manager driven by hand, and an engine without a model around the real scheduler."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from outrider.kv import NO_DRAFTER, Full, GroupSpec, Interval, KVConfig, KVFootprint, KVLayout, KVManager
from outrider.kv import Sliding as SlidingKind
from outrider.kv.archetypes import ARCHETYPES, DrafterShape
from outrider.kv.intervals import pages_under
from outrider.kv.ledger import SequenceKV
from outrider.kv.observer import Hit, KVObserver
from outrider.kv.pages import NULL_PAGE
from outrider.kv.plan import BlockTableLists, KVPlan
from outrider.scheduler import RequestSpec, ScheduledRequest, Scheduler, SchedulerConfig, StepPlan, Update, Verdict

ARCHETYPES_WITH_KV = tuple(name for name, archetype in ARCHETYPES.items() if archetype.owns_kv)
OTHER = 99_999
"""A token that no prompt made by ids() contains."""


def full(name: str = "full", *, page: int = 8, slot_bytes: int = 1) -> GroupSpec:
    return GroupSpec(name=name, kind=Full(), page_tokens=page, slot_bytes=slot_bytes)


def sliding(window: int, name: str = "sliding", *, page: int = 8, slot_bytes: int = 1) -> GroupSpec:
    return GroupSpec(name=name, kind=SlidingKind(window), page_tokens=page, slot_bytes=slot_bytes)


def drafter(
    archetype: str,
    *groups: GroupSpec,
    page: int = 8,
    slot_bytes: int = 1,
    max_len: int | None = None,
    fingerprint: str = "",
    block_rows: int = 0,
    smaller_blocks: tuple[int, ...] = (),
) -> KVFootprint:
    """The footprint that an archetype declares; one full draft group unless told otherwise."""
    declared = ARCHETYPES[archetype]
    owned = groups or (full("draft", page=page, slot_bytes=slot_bytes),)
    shape = DrafterShape(
        groups=owned if declared.owns_kv else (),
        taps=(1, 2) if declared.reads_taps else (),
        max_len=max_len,
        fingerprint=fingerprint,
        block_rows=block_rows,
        smaller_blocks=smaller_blocks,
    )
    return declared.declare(archetype, shape)


def make_manager(
    *target: GroupSpec,
    footprint: KVFootprint = NO_DRAFTER,
    pages: int | tuple[int, ...] = 64,
    observer: KVObserver | None = None,
    tiers: Sequence[Any] = (),
    **config: Any,
) -> KVManager:
    """A manager over these target groups; every arena gets `pages` usable pages and the null page."""
    layout = KVLayout(target=target or (full(),), footprint=footprint)
    per_arena = (pages,) * len(layout.arena_page_bytes) if isinstance(pages, int) else pages
    return KVManager(
        layout,
        KVConfig(arena_pages=tuple(count + 1 for count in per_arena), **config),
        observer=observer,
        tiers=tiers,
    )


def ids(count: int, seed: int = 0) -> array[int]:
    """Token ids that differ from those of any other seed from the first one on."""
    return array("I", [1000 * (seed + 1) + number for number in range(count)])


def available(kv: KVManager) -> list[int]:
    return [arena.num_available for arena in kv.pool.arenas]


def everything(kv: KVManager) -> list[int]:
    return [arena.num_pages - 1 for arena in kv.pool.arenas]


def assert_at_rest(kv: KVManager) -> None:
    """No sequence holds anything: all pages but the null page are available again."""
    kv.check_integrity()
    assert not kv.sequences
    assert available(kv) == everything(kv)


class Hand:
    """Drives a KVManager without a scheduler: every plan is applied to block tables like a runner's."""

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.tables = BlockTableLists(len(kv.layout.groups))
        self._next_step = 0
        self._names = 0

    def plan(self) -> KVPlan:
        """Take the next plan; its step is in flight until done()."""
        plan = self.kv.take_plan(self._next_step)
        self._next_step += 1
        plan.apply_to(self.tables)
        return plan

    def done(self, plan: KVPlan) -> None:
        self.kv.complete(plan.step)

    def settle(self) -> KVPlan:
        plan = self.plan()
        self.done(plan)
        return plan

    def open(self, tokens: Iterable[int], *, total: int | None = None, k: int = 0, **more: Any) -> SequenceKV:
        known = array("I", tokens)
        self._names += 1
        total = len(known) + 64 if total is None else total
        return self.kv.open(f"s{self._names}", known, total_tokens=total, k=k, **more)

    def admit(self, tokens: Iterable[int], *, k: int = 0, total: int | None = None, **more: Any) -> SequenceKV:
        sequence = self.open(tokens, k=k, total=total)
        self.kv.admit(sequence, **more)
        return sequence

    def advance(self, sequence: SequenceKV, v: int, *, k: int = 0) -> None:
        """One step that ends at v and proposes k. Every token up to and including v must be known."""
        footprint = self.kv.layout.footprint
        self.kv.reserve(sequence, v, footprint.reserve_end(v=v, k=k))
        plan = self.plan()
        self.kv.commit(sequence, v)
        self.done(plan)

    def prefill(
        self, tokens: Iterable[int], *, sampled: int = 7, k: int = 0, total: int | None = None, **more: Any
    ) -> SequenceKV:
        """Open, admit, compute the whole prompt, and sample one token."""
        sequence = self.admit(tokens, k=k, total=total, **more)
        end = len(sequence.tokens)
        sequence.tokens.append(sampled)
        self.advance(sequence, end, k=k)
        return sequence

    def decode(self, sequence: SequenceKV, tokens: Iterable[int], *, k: int = 0) -> None:
        """Commit what is known and sample these tokens after it, one step for each."""
        for token in tokens:
            sequence.tokens.append(token)
            self.advance(sequence, len(sequence.tokens) - 1, k=k)

    def serve(self, tokens: Iterable[int], **more: Any) -> None:
        """A request that comes, leaves its pages in the cache, and goes."""
        self.kv.close(self.prefill(tokens, **more))
        self.settle()


def assert_tables_agree(hand: Hand, sequence: SequenceKV) -> None:
    """The runner's tables, brought up to date, say what the ledger says."""
    hand.settle()
    for g, _size in hand.kv.holdings.groups(sequence):
        state = sequence.groups[g]
        assert hand.tables.table(sequence.id, g)[state.first_page : len(state.pages)] == state.held()
        assert hand.tables.low(sequence.id, g) == state.low


def held_pages(kv: KVManager, sequence: SequenceKV, group: int) -> dict[int, int]:
    """Page number -> page, of what the sequence holds in one group."""
    state = sequence.groups[group]
    return {n: state.pages[n] for n in range(state.first_page, len(state.pages))}


class Watch(KVObserver):
    """Remembers what the manager published, evicted and found."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []
        """(sequence, group, page number) of every page published, in order."""
        self.evictions: list[tuple[int, int]] = []
        self.hits: dict[str, Hit] = {}

    def admitting(self, sequence: SequenceKV, hit: Hit, *, use_cache: bool, may_draft: bool) -> None:
        self.hits[sequence.id] = hit

    def published(self, sequence: SequenceKV, group: int, page_number: int, page: int, key: bytes) -> None:
        self.log.append((sequence.id, group, page_number))

    def evicted(self, arena: int, page: int) -> None:
        self.evictions.append((arena, page))

    def numbers(self, sequence: SequenceKV, group: int) -> list[int]:
        return [number for id, g, number in self.log if (id, g) == (sequence.id, group)]


def watched(*target: GroupSpec, **more: Any) -> tuple[Hand, Watch]:
    watch = Watch()
    return Hand(make_manager(*target, observer=watch, **more)), watch


# ---- a scheduler and a model that is a formula ---------------------------------------------------------


def next_token(tokens: Sequence[int]) -> int:
    """The fake target: what follows is a function of the tokens so far, whatever the schedule was."""
    return (31 * tokens[-1] + 7 * len(tokens) + sum(tokens[-3:])) % 509 + 1


def reference_text(prompt: Iterable[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What the target alone writes."""
    tokens = list(prompt)
    start = len(tokens)
    while len(tokens) - start < count:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[start:]


def rows_of(row: ScheduledRequest, footprint: KVFootprint) -> int:
    """Everything one request costs in a step: its rows, tap rows, drafting rows and catch-up rows."""
    catch_up = 0
    if row.draft_end >= 0 and footprint.rebuild:
        behind = footprint.backlog(durable_end=row.draft_end, v=row.start)
        catch_up = behind if row.feed_to is None else row.feed_to - row.draft_end
    return row.num_rows + row.tap_rows + footprint.draft_rows(row.propose) + catch_up


class Engine:
    """Runs plans of the real scheduler with the fake target, and checks where every row writes.

    `accepts(rng, drafts)` says how many drafts the target agrees with; `proposes(rng, planned)` how many the
    drafter really came up with; `inspect(plan)` sees each plan while its reservations stand.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        seed: int = 0,
        accepts: Callable[[Random, int], int] = lambda rng, drafts: rng.randint(0, drafts),
        proposes: Callable[[Random, int], int] = lambda rng, planned: planned,
        inspect: Callable[[StepPlan], None] = lambda plan: None,
        **config: Any,
    ) -> None:
        self.kv = kv
        config.setdefault("max_chunk_tokens", kv.config.step_tokens)
        self.scheduler = Scheduler(SchedulerConfig(**config), kv)
        self.rng = Random(seed)
        self.text: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.plans: list[StepPlan] = []
        self._accepts = accepts
        self._proposes = proposes
        self._inspect = inspect
        self._tables = BlockTableLists(len(kv.layout.groups))
        self._planned: StepPlan | None = None

    def add(self, id: str, prompt: Iterable[int], max_tokens: int = 8, n: int = 1, **more: Any) -> None:
        """Add a request; its forks are called id#1, id#2 and so on."""
        ids = (id, *(f"{id}#{index}" for index in range(1, n)))
        self.scheduler.add(
            RequestSpec(id=id, prompt=array("I", prompt), max_tokens=max_tokens, sequence_ids=ids, **more)
        )

    def add_handed_over(
        self, id: str, prompt: Iterable[int], remote: Mapping[int, Interval], *, drafts: int = 0, **more: Any
    ) -> None:
        """Add a request whose prompt a prefill worker has computed, with that worker's answer: the intervals that it
        holds, the first token, and the number of drafts after it."""
        tokens = list(prompt)
        self.add(id, tokens, awaits_peer=True, **more)
        self.scheduler.fetched(id, remote, next_token(tokens), drafts=drafts)

    def take_quarantined(self) -> list[tuple[int, list[int]]]:
        """Returns the (group, pages) that must be restored, of what was given up since the last call."""
        return [part for given_up in self.scheduler.take_given_up() for part in given_up.quarantined]

    def step(self) -> list[Update]:
        """One step; with a step in flight, the next one is planned before the verdict of this one."""
        scheduler = self.scheduler
        plan = self._planned if self._planned is not None else scheduler.schedule()
        verdict = self._run(plan)
        self._planned = scheduler.schedule() if scheduler.config.step_in_flight else None
        updates = scheduler.commit(plan, verdict)
        if self._planned is not None:
            self._planned = scheduler.correct(self._planned)
        self._note(updates)
        return updates

    def run(self, *, max_steps: int = 2000) -> None:
        """Until everything has finished."""
        for _ in range(max_steps):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, f"still here: {sorted(self.scheduler.requests)[:8]}"
        if self._planned is not None:
            self.step()
        self.drain()

    def drain(self) -> None:
        """Complete the plan made ahead, if there is one."""
        if self._planned is not None:
            plan, self._planned = self._planned, None
            self._note(self.scheduler.commit(plan, self._run(plan)))

    def _note(self, updates: list[Update]) -> None:
        for update in updates:
            self.text.setdefault(update.sequence_id, []).extend(update.tokens)
            if update.finish is not None:
                assert update.sequence_id not in self.finished, f"{update.sequence_id} finished twice"
                self.finished[update.sequence_id] = update.finish

    def _run(self, plan: StepPlan) -> Verdict:
        self.plans.append(plan)
        self._inspect(plan)
        plan.kv.apply_to(self._tables)
        tokens, proposed, forks = [], [], {}
        holders = Counter(
            (self.kv.layout.arena_of[g], page)
            for sequence in self.kv.sequences.values()
            for g, state in enumerate(sequence.groups)
            for page in state.held()
        )
        for row in plan.scheduled:
            request = self.scheduler.requests.get(row.sequence_id)
            if request is not None and row not in request.flight:
                request = None  # planned for an earlier owner of the id, or before a preemption
            sampled: list[int] = []
            if row.samples:
                known = list(request.tokens) if request else [1]
                accepted = self._accepts(self.rng, row.drafts) if row.drafts else 0
                for _ in range(accepted + 1):
                    sampled.append(next_token(known))
                    known.append(sampled[-1])
                if row.samples > 1:
                    forks[row.sequence_id] = tuple(600 + number for number in range(1, row.samples))
            tokens.append(tuple(sampled))
            proposed.append(self._proposes(self.rng, row.propose) if row.propose else 0)
            if request is not None:
                self._check_writes(row, len(sampled), holders)
        return Verdict(step=plan.step, tokens=tuple(tokens), proposed=tuple(proposed), fork_tokens=forks)

    def _check_writes(self, row: ScheduledRequest, num_sampled: int, holders: Counter[tuple[int, int]]) -> None:
        """Every slot that a row writes lies in a page that one sequence holds and that is not in the index."""
        layout, footprint = self.kv.layout, self.kv.layout.footprint
        writes = [(g, Interval(row.start, row.start + row.num_rows)) for g in layout.target_groups]
        if row.draft_end >= 0:
            accepted = max(0, num_sampled - 1)
            v = row.start + row.num_rows - row.drafts + accepted
            feed = footprint.feed(durable_end=row.draft_end, v=v, accepted=accepted, proposed=row.proposed)
            if row.feed_to is not None:
                feed = Interval(feed.start, row.feed_to)
            writes += [(g, feed) for g in layout.draft_groups]
            writes += [(g, footprint.scratch(v, row.propose)) for g in layout.draft_groups]
        for g, positions in writes:
            table = self._tables.table(row.sequence_id, g)
            for number in pages_under(positions, layout.groups[g].page_tokens):
                where = f"{row.sequence_id} writes {positions} of group {g}: page number {number}"
                assert number < len(table), f"{where} is not reserved ({len(table)} pages)"
                page = table[number]
                assert page != NULL_PAGE, f"{where} is the null page"
                assert not self.kv.pool.arena(g).published[page], f"{where} is in the prefix index"
                assert holders[layout.arena_of[g], page] == 1, f"{where} is shared"
