"""Mutations of tiers behind the device: see `mutation_table`.

The patches know the insides of what they patch, loosely typed on purpose: they are bugs, not features.
"""

from __future__ import annotations

from typing import Any

from outrider.tools.sim.mutation import Mutation, needs


def any_trailer_will_do(original: Any) -> Any:
    return lambda self, key, data, trailer: True


def nothing_is_pinned(original: Any) -> Any:
    return type(
        "PoolWithoutPins",
        (original,),
        {"pin": lambda self, group, page: None, "unpin": lambda self, group, page: None},
    )


def target_pages_only(original: Any) -> Any:
    def store(self: Any) -> None:
        new_pages, targets = self._kv.progress._new_pages, self._layout.target_groups
        new_pages[:] = [new for new in new_pages if new.group in targets]
        original(self)

    return store


def given_up_loads_have_ended(original: Any) -> Any:
    def give_up(self: Any, sequence: str) -> set[int]:
        original(self, sequence)
        return set()

    return give_up


TIER_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="trailer_not_checked",
        invariant="I6",
        story="a value that was damaged in a tier is used, since its trailer is not looked at",
        where="outrider.transfer.tiers.sealing:Sealer.is_intact",
        change=any_trailer_will_do,
        needs=needs("tier", "transfer_faults"),
        lineage="R6",
    ),
    Mutation(
        name="pin_forgotten",
        invariant="I5",
        story="a page is evicted and written to while a tier still copies it",
        where="outrider.kv.manager:PagePool",
        change=nothing_is_pinned,
        needs=needs("tier"),
        lineage="R5",
    ),
    Mutation(
        name="draft_group_not_stored",
        invariant="I9",
        story="tiers take the target's pages over and not the drafter's, so that a hit from them drafts badly",
        where="outrider.transfer.offloading:Offloading.store",
        change=target_pages_only,
        needs=needs("tier", "drafts"),
        lineage="R6",
    ),
    Mutation(
        name="late_load_not_awaited",
        invariant="I1",
        story="pages of a load that was given up are used again while the tier may still write to them",
        where="outrider.transfer.offloading:Offloading.give_up",
        change=given_up_loads_have_ended,
        needs=needs("tier", "transfer_faults"),
        lineage="R5",
    ),
)
