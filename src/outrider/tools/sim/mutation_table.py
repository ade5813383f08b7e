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

from outrider.tools.sim import mutation_patches as patches

Change = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    name: str
    invariant: str
    story: str
    where: str
    change: Change
    """Function that takes the original and returns its replacement."""
    needs: frozenset[str] = frozenset()
    """Traits that a scenario must have to exercise the mutation; see outrider.tools.sim.mutations."""
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


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="block_drafter_reserves_k_slots",
        invariant="I1",
        story="a block drafter is given k slots ahead instead of k + 1",
        where="outrider.kv.footprint:KVFootprint.reserve_end",
        change=patches.reserve_k_only,
        needs=_needs("block"),
        lineage="L1",
    ),
    Mutation(
        name="lookahead_zeroed_for_fresh_requests",
        invariant="I1",
        story="nothing is reserved ahead while no token is computed, for every drafter",
        where="outrider.scheduler.planner:Planner._draft_reserve_end",
        change=patches.no_lookahead_when_fresh,
        needs=_needs("drafts"),
        lineage="L1",
    ),
    Mutation(
        name="lookahead_missing_on_first_prefill_after_hit",
        invariant="I1",
        story="the first step after a prefix hit proposes without a page to propose into",
        where="outrider.scheduler.planner:Planner._draft_reserve_end",
        change=patches.no_lookahead_after_hit,
        needs=_needs("drafts"),
        lineage="L2",
    ),
    Mutation(
        name="fit_forgets_the_bonus_slot",
        invariant="I1",
        story="near the drafter's limit a block is one slot too long",
        where="outrider.kv.footprint:KVFootprint.fit",
        change=patches.fit_without_bonus,
        needs=_needs("block", "limit"),
        lineage="L2",
    ),
    Mutation(
        name="retention_mask_forgets_the_margin",
        invariant="I9",
        story="pages that a hit at a boundary reads are not kept in a sliding group",
        where="outrider.kv.manager:RetentionMask",
        change=patches.mask_without_margin,
        needs=_needs("sliding"),
        lineage="L3",
    ),
    Mutation(
        name="host_tier_mask_forgets_the_margin",
        invariant="I9",
        story="the tier in the host's memory does not take over a page that a hit at a boundary reads",
        where="outrider.tools.sim.tier:FakeTier.wants",
        change=patches.tier_mask_without_margin("host"),
        needs=_needs("host_tier"),
        lineage="L3",
    ),
    Mutation(
        name="remote_tier_mask_forgets_the_margin",
        invariant="I9",
        story="the tier that workers share does not take over a page that a hit at a boundary reads",
        where="outrider.tools.sim.tier:FakeTier.wants",
        change=patches.tier_mask_without_margin("remote"),
        needs=_needs("remote_tier"),
        lineage="L3",
    ),
    Mutation(
        name="pages_kept_that_serve_no_hit",
        invariant="I9",
        story="every page of a sliding group is kept, needed or not",
        where="outrider.kv.retention:RetentionMask.runs",
        change=patches.mask_keeps_everything,
        needs=_needs("sliding"),
        lineage="L3",
    ),
    Mutation(
        name="drafters_window_kept_at_boundaries_only",
        invariant="I9",
        story="the target is hit anywhere, and a drafter with a window has lost its context there",
        where="outrider.kv.manager:RetentionMask",
        change=patches.drafts_kept_for_boundaries_only,
        needs=_needs("sliding_drafts"),
    ),
    Mutation(
        name="drafters_window_kept_short_before_boundaries",
        invariant="I9",
        story="the target's pages for an end serve hits that end earlier, and a drafter with a window is short there",
        where="outrider.kv.retention:kept_margins",
        change=patches.drafts_kept_for_their_own_window,
        needs=_needs("sliding", "sliding_drafts"),
    ),
    Mutation(
        name="draft_pages_never_published",
        invariant="I9",
        story="only the target's pages enter the index, so a drafter starts every hit without its context",
        where="outrider.kv.progress:Progress.publish",
        change=patches.publish_target_groups_only,
        needs=_needs("drafts"),
    ),
    Mutation(
        name="draft_pages_published_late",
        invariant="I9",
        story="a draft page that completes between two pages of the target waits for the later one",
        where="outrider.kv.progress:Progress.find_next_event",
        change=patches.publish_target_groups_only,
        needs=_needs("drafts"),
    ),
    Mutation(
        name="draft_pages_not_taken_by_hits",
        invariant="I9",
        story="a drafter starts afresh at the end of every hit, although its pages are cached",
        where="outrider.kv.manager:find_hit",
        change=patches.no_drafts_in_hits,
        needs=_needs("drafts"),
    ),
    Mutation(
        name="shared_prefix_not_noticed",
        invariant="I9",
        story="with ends alone kept, what two prompts share is not kept for the third",
        where="outrider.kv.manager:shared_end",
        change=patches.nothing_shared,
        needs=_needs("ends"),
    ),
    Mutation(
        name="window_freed_under_the_end",
        invariant="I9",
        story="a page that the end of a text needs is freed before the text ends",
        where="outrider.kv.retention:RetentionMask.held_from",
        change=patches.free_under_the_end,
        needs=_needs("ends"),
    ),
    Mutation(
        name="end_kept_with_slots_that_never_arrived",
        invariant="I2",
        story="a text that came from a peer ends, and a page of which only the back was sent is kept for its end",
        where="outrider.kv.progress:Progress.publish_end",
        change=patches.keep_ends_whole,
        needs=_needs("ends", "loads"),
    ),
    Mutation(
        name="pages_behind_the_window_kept",
        invariant="I5",
        story="generation moves on, and the pages behind its windows are never given back",
        where="outrider.kv.progress:Progress.free_behind",
        change=patches.free_behind_nothing,
        needs=_needs("sliding"),
    ),
    Mutation(
        name="drafter_drops_the_last_block_of_a_hit",
        invariant="I9",
        story="a drafter that reaches ahead costs the target a whole page of every hit",
        where="outrider.kv.manager:find_hit",
        change=patches.drop_last_block,
        needs=_needs("reach"),
        lineage="L3",
    ),
    Mutation(
        name="transfer_trims_to_the_last_pages",
        invariant="I6",
        story="a surplus page of the sender is taken for a prefix: the last n pages are copied",
        where="outrider.transfer.driver:plan_pull",
        change=patches.trim_to_last_pages,
        needs=_needs("split", "drafts"),
        lineage="L4",
    ),
    Mutation(
        name="keys_without_the_reach",
        invariant="I2",
        story="a drafter that reaches ahead gets page-aligned keys",
        where="outrider.kv.layout:KVLayout.__post_init__",
        change=patches.keys_without_reach,
        needs=_needs("reach"),
        lineage="L3",
    ),
    Mutation(
        name="salt_left_out_of_the_seed",
        invariant="I2",
        story="two tenants share pages",
        where="outrider.kv.prefix:CacheIdentity.root",
        change=patches.salt_left_out,
        needs=_needs("salt"),
    ),
    Mutation(
        name="adapter_left_out_of_the_seed",
        invariant="I2",
        story="requests with and without an adapter share pages",
        where="outrider.kv.prefix:CacheIdentity.root",
        change=patches.adapter_left_out,
        needs=_needs("adapter"),
    ),
    Mutation(
        name="media_hashed_by_token_id",
        invariant="I2",
        story="two pictures with the same placeholders share pages",
        where="outrider.kv.prefix:Chain._media_bytes",
        change=patches.media_by_token_id,
        needs=_needs("media"),
    ),
    Mutation(
        name="scratch_is_published",
        invariant="I2",
        story="a page is published one slot too early",
        where="outrider.kv.progress:Progress.publish",
        change=patches.publish_last_sampled,
    ),
    Mutation(
        name="copy_on_write_skipped",
        invariant="I1",
        story="a hit that ends inside a page shares it, and writes to it",
        where="outrider.kv.admission:place",
        change=patches.share_instead_of_copy,
    ),
    Mutation(
        name="freed_behind_the_speculative_end",
        invariant="I3",
        story="a window moves with drafts that are not accepted yet",
        where="outrider.kv.progress:Progress.free_behind",
        change=patches.free_behind_speculation,
        needs=_needs("sliding"),
    ),
    Mutation(
        name="double_free",
        invariant="I5",
        story="a finished request gives a page back twice",
        where="outrider.kv.manager:KVManager.close",
        change=patches.release_twice,
    ),
    Mutation(
        name="page_leaked_on_abort",
        invariant="I5",
        story="an aborted request forgets its last page",
        where="outrider.scheduler.scheduler:Scheduler.abort",
        change=patches.leak_on_abort,
        needs=_needs("abort"),
    ),
    Mutation(
        name="pages_reused_while_a_step_is_in_flight",
        invariant="I1",
        story="pages are handed out that a running step still writes to",
        where="outrider.kv.pool:PagePool.step_in_flight",
        change=patches.nothing_in_flight,
        needs=_needs("abort"),
    ),
    Mutation(
        name="pages_given_back_that_a_plan_counts_on",
        invariant="I1",
        story="a commit trims what the step planned ahead has reserved",
        where="outrider.kv.manager:KVManager.commit",
        change=patches.ignore_plans_ahead,
        needs=_needs("in_flight"),
    ),
    Mutation(
        name="drafting_goes_on_without_pages",
        invariant="I1",
        story="draft groups that found no pages are not dropped",
        where="outrider.kv.manager:KVManager.reserve",
        change=patches.keep_drafting_without_pages,
        needs=_needs("drafts", "tight"),
    ),
    Mutation(
        name="feed_skipped_when_k_is_0",
        invariant="I8",
        story="a step that proposes nothing does not feed the drafter",
        where="outrider.scheduler.plan:ScheduledRequest.feeds",
        change=patches.feed_only_when_proposing,
        needs=_needs("drafts"),
    ),
    Mutation(
        name="last_accepted_draft_never_written",
        invariant="I3",
        story="when every draft is accepted, the slot of the last one is a hole that proposing reads",
        where="outrider.kv.footprint:KVFootprint.fed_from",
        change=patches.keep_unwritten_draft,
        needs=_needs("keeps"),
    ),
    Mutation(
        name="tap_rows_left_out",
        invariant="I8",
        story="after a hit the drafter is not fed the slots before it",
        where="outrider.scheduler.planner:Planner._tap_rows",
        change=patches.no_tap_rows,
        needs=_needs("reach"),
    ),
    Mutation(
        name="tap_rows_write_to_pages",
        invariant="I1",
        story="rows that run again for their taps write into the pages they hit",
        where="outrider.scheduler.plan:ScheduledRequest.kept_from",
        change=patches.tap_rows_write,
        needs=_needs("reach"),
    ),
    Mutation(
        name="fork_shares_the_reaching_slot",
        invariant="I3",
        story="forks share a draft slot that depends on the token in which they differ",
        where="outrider.kv.manager:KVManager._fork_groups",
        change=patches.fork_shares_reach,
        needs=_needs("reach", "fork"),
    ),
    Mutation(
        name="rejected_drafts_committed",
        invariant="I4",
        story="every verified row counts as durable",
        where="outrider.scheduler.scheduler:Scheduler._commit_kv",
        change=patches.commit_every_row,
        needs=_needs("drafts"),
    ),
    Mutation(
        name="handshake_ignores_the_weights",
        invariant="I6",
        story="KV that other weights made is taken over, since its layout is the same",
        where="outrider.kv.prefix:CacheIdentity.label",
        change=patches.identity_left_out,
        needs=_needs("split", "other_weights"),
    ),
    Mutation(
        name="stale_import_after_failed_transfer",
        invariant="I6",
        story="a failed load is taken for an arrived one",
        where="outrider.scheduler.scheduler:Scheduler.load_failed",
        change=patches.failure_counts_as_arrival,
        needs=_needs("split", "transfer_faults"),
    ),
    Mutation(
        name="lease_not_confirmed",
        invariant="I6",
        story="pages are used although the sender's lease ran out while they were read",
        where="outrider.transfer.leases:LeaseBook.held",
        change=patches.lease_always_held,
        needs=_needs("split", "transfer_faults"),
    ),
    Mutation(
        name="lost_transfer_not_quarantined",
        invariant="I1",
        story="pages of a transfer that timed out are reused while it may still write",
        where="outrider.kv.manager:KVManager.abandon_loading",
        change=patches.no_quarantine,
        needs=_needs("split", "transfer_faults"),
    ),
    Mutation(
        name="published_before_every_group_arrived",
        invariant="I2",
        story="imported pages enter the index one group at a time",
        where="outrider.kv.manager:KVManager.import_interval",
        change=patches.publish_each_arrival,
        needs=_needs("split"),
    ),
    Mutation(
        name="found_pages_held_too_late",
        invariant="I2",
        story="taking fresh pages evicts what the search has just found",
        where="outrider.kv.manager:Holdings",
        change=patches.hold_after_taking,
        needs=_needs("tight"),
    ),
    Mutation(
        name="published_before_its_copy_ran",
        invariant="I2",
        story="loads arrive before the step that copies a page, which is published half empty",
        where="outrider.kv.manager:KVManager.may_finish_loading",
        change=patches.start_before_copies,
        needs=_needs("loads"),
    ),
    Mutation(
        name="draft_slots_assumed_after_a_failed_load",
        invariant="I8",
        story="after a load the draft groups are taken to end at the start, whatever arrived",
        where="outrider.kv.manager:KVManager._settle_draft",
        change=patches.settle_drafts_at_the_start,
        needs=_needs("drafts", "loads", "transfer_faults"),
    ),
    Mutation(
        name="failed_draft_page_published",
        invariant="I2",
        story="a page below what arrived is offered to the index",
        where="outrider.kv.holdings:Holdings.keep_run",
        change=patches.publish_failed_pages,
        needs=_needs("taps", "tier", "transfer_faults"),
    ),
    Mutation(
        name="window_freed_under_tap_rows",
        invariant="I3",
        story="a start frees pages that its own tap rows are about to read",
        where="outrider.kv.manager:KVManager._start_at",
        change=patches.free_under_tap_rows,
        needs=_needs("sliding", "reach"),
    ),
    Mutation(
        name="quarantined_page_free_under_a_copy",
        invariant="I1",
        story="a page comes out of quarantine while a planned copy still writes to it",
        where="outrider.kv.pool:PagePool.restore",
        change=patches.restore_at_once,
        needs=_needs("split", "transfer_faults"),
    ),
    Mutation(
        name="drafts_of_a_planned_request_dropped",
        invariant="I1",
        story="pages are taken from a drafter that this very step will run",
        where="outrider.scheduler.planner:Planner._make_room",
        change=patches.drop_planned_drafts,
        needs=_needs("drafts", "tight", "shared_arena"),
    ),
    Mutation(
        name="commit_trims_a_page_too_many",
        invariant="I3",
        story="with surplus pages a commit gives back one that holds durable slots",
        where="outrider.kv.progress:Progress.trim",
        change=patches.trim_one_page_too_many,
        needs=_needs("drafts", "surplus"),
    ),
    Mutation(
        name="commit_trims_a_page_too_few",
        invariant="I5",
        story="a commit keeps a page that no next step will ask for",
        where="outrider.kv.progress:Progress.trim",
        change=patches.trim_one_page_too_few,
        needs=_needs("drafts", "surplus"),
    ),
)


def mutation_named(name: str) -> Mutation | None:
    return next((mutation for mutation in MUTATIONS if mutation.name == name), None)
