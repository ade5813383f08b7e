"""Further tiers of the cache, as the simulation sees them: pages by key, first in, first out.

A host tier belongs to one worker and dies with it; a remote one outlives workers. Each takes over what a device
publishes, as far as its own policy keeps it, by the same mask. The driver loads from them through `TierLoads`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from outrider.kv.layout import KVLayout
from outrider.kv.ledger import Load
from outrider.kv.retention import Marks, Retention, RetentionMask
from outrider.sanitizer.shadow import DURABLE
from outrider.tools.sim.faults import load_fate
from outrider.tools.sim.oracle import chance
from outrider.transfer.link import Failed, Landed

if TYPE_CHECKING:
    from collections import Counter

    from outrider.tools.sim.worker import Worker

HOST, REMOTE = "host", "remote"


class TierPage(NamedTuple):
    values: list[bytes]
    ids: list[int]


class FakeTier:
    """A tier that answers contains() for the hit search, and hands pages out as long as it has them."""

    def __init__(
        self, name: str, layout: KVLayout, retention: Retention, *, probability: float, capacity_pages: int
    ) -> None:
        self.name = name
        self.retention = retention
        self.probability = probability
        """Probability that the tier takes a page that it is offered and wants: a tier may be busy, or down."""
        self.mask = RetentionMask(layout, retention)
        self._capacity = capacity_pages
        self._pages: dict[tuple[int, bytes], TierPage] = {}
        self._last_ids: set[tuple[int, int]] = set()

    def wants(self, group: int, page_number: int, marks: Marks) -> bool:
        """Whether a page that the device publishes is worth keeping in this tier too."""
        return self.mask.keeps(group, page_number, marks)

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self._pages

    def holds_identity(self, group: int, last_slot: int) -> bool:
        """Whether the tier holds the page whose last slot has this identity; the sanitizer does not ask by key."""
        return (group, last_slot) in self._last_ids

    def put(self, group: int, key: bytes, page: TierPage) -> None:
        if (group, key) in self._pages:
            return
        self._pages[group, key] = page
        self._last_ids.add((group, page.ids[-1]))
        while len(self._pages) > self._capacity:
            (old_group, old_key) = next(iter(self._pages))
            old = self._pages.pop((old_group, old_key))
            self._last_ids.discard((old_group, old.ids[-1]))

    def get(self, group: int, key: bytes) -> TierPage | None:
        return self._pages.get((group, key))


class TierLoads:
    """One worker's loads from its tiers: `transfer.records.Tiers`."""

    def __init__(self, worker: Worker, counts: Counter[str], at: Callable[[int, Callable[[], None]], None]) -> None:
        self._worker = worker
        self._counts = counts
        self._at = at
        self._numbers = count()
        self._ended: list[Landed | Failed] = []

    def load(self, load: Load, page: int, sequence: str) -> int:
        number, worker = next(self._numbers), self._worker
        epoch = worker.scheduler.requests[sequence].epoch
        fate = load_fate(worker.scenario, sequence, f"{worker.engine}:{epoch}:{load.group}:{load.interval.start}")
        self._counts["tier_load_late"] += fate.delay > worker.driver.limits.read_s
        self._at(fate.delay, lambda: self._end(number, load, page, sequence, failed=fate.failed))
        return number

    def _end(self, number: int, load: Load, page: int, sequence: str, *, failed: bool) -> None:
        """Write the page, whether its request still waits for it or not."""
        worker = self._worker
        if not worker.alive:
            return
        assert load.key is not None
        found = (tier.get(load.group, load.key) for tier in worker.tiers)
        kept = next((page for page in found if page is not None), None)
        if kept is None or failed:
            self._counts["tier_load_failed"] += 1
            slides = worker.layout.groups[load.group].kind.slides
            self._counts["draft_window_load_failed"] += slides and load.group in worker.layout.draft_groups
            self._ended.append(Failed(number, "the tier does not have the page any more"))
        else:
            slots = load.interval.size
            states = bytes([DURABLE]) * slots
            worker.sanitizer.steps.landed(sequence, load.group, page, 0, kept.ids[:slots], states, "tier")
            worker.device.memory[worker.layout.arena_of[load.group]][page][:slots] = kept.values[:slots]
            self._counts["tier_load"] += 1
            self._ended.append(Landed(number))
        worker.wake()

    def poll(self) -> list[Landed | Failed]:
        ended, self._ended = self._ended, []
        return ended


def offload(worker: Worker, counts: Counter[str]) -> None:
    """Let a worker's tiers take over some of the pages that it has published."""
    pages, worker.sanitizer.new_pages = worker.sanitizer.new_pages, []
    for tier in worker.tiers:
        for new in pages:
            arena = worker.kv.pool.arenas[worker.layout.arena_of[new.group]]
            taken = chance(worker.scenario.seed, "tier", tier.name, new.key) < tier.probability
            if not taken or not arena.published[new.page]:
                continue
            wanted = tier.wants(new.group, new.page_number, new.marks)
            worker.sanitizer.check_tier(tier, new, wanted=wanted)
            if wanted:
                size = worker.layout.groups[new.group].page_tokens
                ids, _states = worker.sanitizer.steps.slots(new.group, new.page, 0, size)
                values = worker.device.memory[arena.index][new.page][:size]
                tier.put(new.group, new.key, TierPage(list(values), ids))
                counts[f"{tier.name}_tier_page"] += 1
