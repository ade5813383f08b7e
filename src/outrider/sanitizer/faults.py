"""Mutations: small patches of the real code that put real bugs back.

Each names the invariant that it must break. A checker without a fault that makes it fire proves nothing,
and a fault that only crashes is not caught. `lineage` points at the report in docs/lineage.md it re-enacts.

Patches are named by path ("module:Class.attribute"), so that this table imports nothing it patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from outrider.kv.footprint import KVFootprint
from outrider.kv.intervals import Interval, SlotRun, page_count

Change = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    name: str
    invariant: str
    story: str
    where: str
    change: Change
    """Takes the original, returns what replaces it."""
    needs: frozenset[str] = frozenset()
    """Traits a scenario must have to exercise it; see outrider.sim.mutations."""
    lineage: str = ""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Patch for the duration of a with-block."""
        module_name, path = self.where.split(":")
        owner: Any = import_module(module_name)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = owner.__dict__[attribute]
        setattr(owner, attribute, self.change(original))
        try:
            yield
        finally:
            setattr(owner, attribute, original)


def _needs(*traits: str) -> frozenset[str]:
    return frozenset(traits)


# ---- reservation and fit -------------------------------------------------------------------------------


def _reserve_k_only(original: Any) -> Any:
    def reserve_end(self: KVFootprint, *, v: int, k: int) -> int:
        return v + max(self.durable_lead, k) if self.groups else 0

    return reserve_end


def _no_lookahead_when_fresh(original: Any) -> Any:
    def reserve_end(self: Any, request: Any, v: int, k: int) -> int:
        return int(original(self, request, v, 0 if request.kv.committed == 0 else k))

    return reserve_end


def _no_lookahead_after_hit(original: Any) -> Any:
    def reserve_end(self: Any, request: Any, v: int, k: int) -> int:
        first_after_hit = request.kv.hit > 0 and request.kv.committed == request.kv.hit
        return int(original(self, request, v, 0 if first_after_hit else k))

    return reserve_end


def _fit_without_bonus(original: Any) -> Any:
    def fit(self: KVFootprint, *, k: int, v: int, max_model_len: int, remaining_tokens: int) -> int:
        k = min(k, max_model_len - v - 1, remaining_tokens - 1)
        return max(0, k if self.max_len is None else min(k, self.max_len - v))

    return fit


def _ignore_plans_ahead(original: Any) -> Any:
    def commit(self: Any, sequence: Any, v: int, *, ahead: int = 0, **others: Any) -> None:
        original(self, sequence, v, ahead=0, **others)

    return commit


def _keep_drafting_without_pages(original: Any) -> Any:
    def drop_draft(self: Any, sequence: Any) -> None:
        self.dropped_drafts += 1
        self.holdings.measure_room(sequence)

    return drop_draft


# ---- keys, publication, hits, retention ----------------------------------------------------------------


def _keys_without_reach(original: Any) -> Any:
    def post_init(self: Any) -> None:
        original(self)
        object.__setattr__(self, "reach", (0,) * len(self.groups))

    return post_init


def _salt_left_out(original: Any) -> Any:
    def root(self: Any, *, adapter: str = "", salt: str = "") -> bytes:
        return bytes(original(self, adapter=adapter, salt=""))

    return root


def _publish_last_sampled(original: Any) -> Any:
    def publish(self: Any, sequence: Any) -> None:
        early = int(sequence.target_room > sequence.committed and sequence.draft_room > sequence.draft_end)
        sequence.committed += early
        sequence.draft_end += early
        try:
            original(self, sequence)
        finally:
            sequence.committed -= early
            sequence.draft_end -= early

    return publish


def _mask_without_margin(original: Any) -> Any:
    def retains(self: Any, page: Interval, *, alignment: int, margin: int) -> bool:
        return bool(original(self, page, alignment=alignment, margin=0))

    return retains


def _drop_last_block(original: Any) -> Any:
    def find_hit(views: Any, num_target: int, footprint: KVFootprint, limit: int, *, draft: bool) -> Any:
        hit = original(views, num_target, footprint, limit, draft=draft)
        if footprint.token_reach and draft and hit.end:
            shorter = max(0, hit.end - views[0].page_tokens)
            return original(views, num_target, footprint, shorter, draft=draft)
        return hit

    return find_hit


def _share_instead_of_copy(original: Any) -> Any:
    def place(view: Any, hold: Interval) -> Any:
        placement = original(view, hold)
        for number, source, _slots in placement.copied:
            if view.find(number).slots < view.page_tokens:
                return placement
            placement.pages[number - placement.first_page] = source
            placement.shared.append(source)
        return placement._replace(copied=[])

    return place


# ---- freeing and page accounting -----------------------------------------------------------------------


def _free_behind_speculation(original: Any) -> Any:
    def free_behind(self: Any, sequence: Any, margin: int) -> None:
        committed, draft_end = sequence.committed, sequence.draft_end
        sequence.committed += sequence.target_headroom
        sequence.draft_end += sequence.target_headroom
        try:
            original(self, sequence, margin)
        finally:
            sequence.committed, sequence.draft_end = committed, draft_end

    return free_behind


def _release_twice(original: Any) -> Any:
    def close(self: Any, sequence: Any) -> None:
        for group, state in enumerate(sequence.groups):
            self.holdings.give_back(group, state.held()[:1])
        original(self, sequence)

    return close


def _leak_on_abort(original: Any) -> Any:
    def abort(self: Any, request_id: str) -> Any:
        request = self.requests.get(request_id)
        if request is not None:
            for state in request.kv.groups:
                if len(state.pages) > state.first_page:
                    state.pages.pop()
        return original(self, request_id)

    return abort


def _nothing_in_flight(original: Any) -> Any:
    return property(lambda self: False)


# ---- feeding -------------------------------------------------------------------------------------------


def _feed_only_when_proposing(original: Any) -> Any:
    return property(lambda row: row.draft_end >= 0 and row.propose > 0)


def _keep_unwritten_draft(original: Any) -> Any:
    def fed_from(self: KVFootprint, *, durable_end: int, accepted: int, proposed: int) -> int:
        return durable_end + accepted if self.keeps_accepted else durable_end

    return fed_from


def _tap_rows_write(original: Any) -> Any:
    return property(lambda row: row.start - row.tap_rows)


def _no_tap_rows(original: Any) -> Any:
    return lambda self, request: 0


def _fork_shares_reach(original: Any) -> Any:
    def fork_groups(self: Any, parent: Any, child: Any, groups: Any, end: int) -> None:
        if groups is self.holdings.draft:
            end = child.draft_end = min(parent.committed, parent.draft_end)
        original(self, parent, child, groups, end)

    return fork_groups


def _commit_every_row(original: Any) -> Any:
    def commit_kv(self: Any, request: Any, row: Any, v: int, **others: Any) -> None:
        original(self, request, row, row.start + row.num_rows, **others)

    return commit_kv


# ---- transfer ------------------------------------------------------------------------------------------


def _trim_to_last_pages(original: Any) -> Any:
    def plan_pull(layout: Any, load: Any, offer: Any, table: Any) -> tuple[SlotRun, ...]:
        runs = original(layout, load, offer, table)
        size = layout.groups[load.group].page_tokens
        offered = next(g for s, g in offer.groups.items() if s.name == layout.groups[load.group].name)
        if offered.page_tokens != size:
            return tuple(runs)
        # "A surplus on the other side is a cached prefix": keep its last pages, as many as are wanted here.
        first = load.interval.start // size
        wanted = page_count(load.interval.end, size) - first
        last_pages = offered.pages[len(offered.pages) - wanted :]
        return tuple(run._replace(source_page=last_pages[(run.start // size) - first]) for run in runs)

    return plan_pull


def _failure_counts_as_arrival(original: Any) -> Any:
    return lambda self, request_id, load: self.load_arrived(request_id, load)


def _lease_always_held(original: Any) -> Any:
    return lambda self, lease: True


def _no_quarantine(original: Any) -> Any:
    def abandon_loading(self: Any, sequence: Any) -> list[tuple[int, list[int]]]:
        self.holdings.return_all(sequence)
        return []

    return abandon_loading


def _publish_each_arrival(original: Any) -> Any:
    def import_interval(self: Any, sequence: Any, load: Any) -> None:
        original(self, sequence, load)
        if load.key is None and load.group < self.layout.num_target:
            sequence.committed = load.interval.end
            self.publish(sequence)
            sequence.committed = 0

    return import_interval


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="block_drafter_reserves_k_slots",
        invariant="I1",
        story="a block drafter is given k slots ahead instead of k + 1",
        where="outrider.kv.footprint:KVFootprint.reserve_end",
        change=_reserve_k_only,
        needs=_needs("block"),
        lineage="L1",
    ),
    Mutation(
        name="lookahead_zeroed_for_fresh_requests",
        invariant="I1",
        story="nothing is reserved ahead while no token is computed, for every drafter",
        where="outrider.scheduler.planner:Planner._draft_reserve_end",
        change=_no_lookahead_when_fresh,
        needs=_needs("drafts"),
        lineage="L1",
    ),
    Mutation(
        name="lookahead_missing_on_first_prefill_after_hit",
        invariant="I1",
        story="the first step after a prefix hit proposes without a page to propose into",
        where="outrider.scheduler.planner:Planner._draft_reserve_end",
        change=_no_lookahead_after_hit,
        needs=_needs("drafts"),
        lineage="L2",
    ),
    Mutation(
        name="fit_forgets_the_bonus_slot",
        invariant="I1",
        story="near the drafter's limit a block is one slot too long",
        where="outrider.kv.footprint:KVFootprint.fit",
        change=_fit_without_bonus,
        needs=_needs("block", "limit"),
        lineage="L2",
    ),
    Mutation(
        name="retention_mask_forgets_the_margin",
        invariant="I9",
        story="pages that a hit at a boundary reads are not kept in a sliding group",
        where="outrider.kv.groups.base:GroupKind.retains",
        change=_mask_without_margin,
        needs=_needs("sliding"),
        lineage="L3",
    ),
    Mutation(
        name="drafter_drops_the_last_block_of_a_hit",
        invariant="I9",
        story="a drafter that reaches ahead costs the target a whole page of every hit",
        where="outrider.kv.manager:find_hit",
        change=_drop_last_block,
        needs=_needs("reach"),
        lineage="L3",
    ),
    Mutation(
        name="transfer_trims_to_the_last_pages",
        invariant="I6",
        story="a surplus page of the sender is taken for a prefix: the last n pages are copied",
        where="outrider.sim.transfers:plan_pull",
        change=_trim_to_last_pages,
        needs=_needs("split", "drafts"),
        lineage="L4",
    ),
    Mutation(
        name="keys_without_the_reach",
        invariant="I2",
        story="a drafter that reaches ahead gets page-aligned keys",
        where="outrider.kv.layout:KVLayout.__post_init__",
        change=_keys_without_reach,
        needs=_needs("reach"),
    ),
    Mutation(
        name="salt_left_out_of_the_seed",
        invariant="I2",
        story="two tenants share pages",
        where="outrider.kv.prefix:CacheIdentity.root",
        change=_salt_left_out,
        needs=_needs("salt"),
    ),
    Mutation(
        name="scratch_is_published",
        invariant="I2",
        story="a page is published one slot too early",
        where="outrider.kv.manager:KVManager.publish",
        change=_publish_last_sampled,
    ),
    Mutation(
        name="copy_on_write_skipped",
        invariant="I1",
        story="a hit that ends inside a page shares it, and writes to it",
        where="outrider.kv.admission:place",
        change=_share_instead_of_copy,
    ),
    Mutation(
        name="freed_behind_the_speculative_end",
        invariant="I3",
        story="a window moves with drafts that are not accepted yet",
        where="outrider.kv.manager:KVManager._free_behind",
        change=_free_behind_speculation,
        needs=_needs("sliding"),
    ),
    Mutation(
        name="double_free",
        invariant="I5",
        story="a finished request gives a page back twice",
        where="outrider.kv.manager:KVManager.close",
        change=_release_twice,
    ),
    Mutation(
        name="page_leaked_on_abort",
        invariant="I5",
        story="an aborted request forgets its last page",
        where="outrider.scheduler.scheduler:Scheduler.abort",
        change=_leak_on_abort,
        needs=_needs("abort"),
    ),
    Mutation(
        name="pages_reused_while_a_step_is_in_flight",
        invariant="I1",
        story="pages are handed out that a running step still writes to",
        where="outrider.kv.pool:PagePool.step_in_flight",
        change=_nothing_in_flight,
        needs=_needs("abort"),
    ),
    Mutation(
        name="pages_given_back_that_a_plan_counts_on",
        invariant="I1",
        story="a commit trims what the step planned ahead has reserved",
        where="outrider.kv.manager:KVManager.commit",
        change=_ignore_plans_ahead,
        needs=_needs("in_flight"),
    ),
    Mutation(
        name="drafting_goes_on_without_pages",
        invariant="I1",
        story="draft groups that found no pages are not dropped",
        where="outrider.kv.manager:KVManager.drop_draft",
        change=_keep_drafting_without_pages,
        needs=_needs("drafts", "tight"),
    ),
    Mutation(
        name="feed_skipped_when_k_is_0",
        invariant="I8",
        story="a step that proposes nothing does not feed the drafter",
        where="outrider.scheduler.plan:StepRow.feeds",
        change=_feed_only_when_proposing,
        needs=_needs("drafts"),
    ),
    Mutation(
        name="last_accepted_draft_never_written",
        invariant="I3",
        story="when every draft is accepted, the slot of the last one is a hole that proposing reads",
        where="outrider.kv.footprint:KVFootprint.fed_from",
        change=_keep_unwritten_draft,
        needs=_needs("keeps"),
    ),
    Mutation(
        name="tap_rows_left_out",
        invariant="I8",
        story="after a hit the drafter is not fed the slots before it",
        where="outrider.scheduler.planner:Planner._tap_rows",
        change=_no_tap_rows,
        needs=_needs("reach"),
    ),
    Mutation(
        name="tap_rows_write_to_pages",
        invariant="I1",
        story="rows that run again for their taps write into the pages they hit",
        where="outrider.scheduler.plan:StepRow.kept_from",
        change=_tap_rows_write,
        needs=_needs("reach"),
    ),
    Mutation(
        name="fork_shares_the_reaching_slot",
        invariant="I3",
        story="forks share a draft slot that depends on the token in which they differ",
        where="outrider.kv.manager:KVManager._fork_groups",
        change=_fork_shares_reach,
        needs=_needs("reach", "fork"),
    ),
    Mutation(
        name="rejected_drafts_committed",
        invariant="I4",
        story="every verified row counts as durable",
        where="outrider.scheduler.scheduler:Scheduler._commit_kv",
        change=_commit_every_row,
        needs=_needs("drafts"),
    ),
    Mutation(
        name="stale_import_after_failed_transfer",
        invariant="I6",
        story="a failed load is taken for an arrived one",
        where="outrider.scheduler.scheduler:Scheduler.load_failed",
        change=_failure_counts_as_arrival,
        needs=_needs("split", "transfer_faults"),
    ),
    Mutation(
        name="lease_not_confirmed",
        invariant="I6",
        story="pages are used although the sender's lease ran out while they were read",
        where="outrider.transfer.connector:LeaseBook.held",
        change=_lease_always_held,
        needs=_needs("split", "transfer_faults"),
    ),
    Mutation(
        name="lost_transfer_not_quarantined",
        invariant="I1",
        story="pages of a transfer that timed out are reused while it may still write",
        where="outrider.kv.manager:KVManager.abandon_loading",
        change=_no_quarantine,
        needs=_needs("split", "transfer_faults"),
    ),
    Mutation(
        name="published_before_every_group_arrived",
        invariant="I2",
        story="imported pages enter the index one group at a time",
        where="outrider.kv.manager:KVManager.import_interval",
        change=_publish_each_arrival,
        needs=_needs("split"),
    ),
)


def mutation_named(name: str) -> Mutation | None:
    return next((mutation for mutation in MUTATIONS if mutation.name == name), None)
