"""Tiers behind simulated devices.

A worker's host tier is the real one on memory that is made up here: only the copies are virtual. The store that workers
share is virtual: it keeps sealed values, loses some, damages some, is slow, and now and then dies and comes back empty.
Both read the pages of a device when a copy takes place, not when it was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from outrider.kv.layout import KVLayout
from outrider.kv.publication import NewPage
from outrider.kv.retention import Retention
from outrider.sanitizer.shadow import DURABLE
from outrider.sanitizer.tiers import TierWatch
from outrider.tools.sim.faults import LoadFate, load_fate
from outrider.tools.sim.oracle import chance
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.tier import Done, TierPage
from outrider.transfer.tiers.host import CopyEnded, HostTier
from outrider.transfer.tiers.sealing import Sealer

if TYPE_CHECKING:
    from outrider.kv.ledger import Load
    from outrider.tools.sim.worker import WatchingSanitizer, Worker

HOST, REMOTE = "host", "remote"
SEALER = Sealer(b"the secret of all simulated workers")
HOST_PAGES = 60
"""Number of the largest pages that a host tier has room for."""


class Value(NamedTuple):
    """A page outside the device: its bytes, and what the checker knew of its slots."""

    data: bytes
    trailer: bytes
    ids: list[int]


class PageMemory:
    """Reads and writes pages of one worker as tiers do, at the very tick of the copy."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._times: Counter[bytes] = Counter()
        """How often each page was loaded."""

    def read(self, page: TierPage) -> Value:
        worker = self.worker
        size = worker.layout.groups[page.group].page_tokens
        ids, _states = worker.sanitizer.steps.slots(page.group, page.page, 0, size)
        data = b"".join(worker.device.memory[worker.layout.arena_of[page.group]][page.page][:size])
        return Value(data, SEALER.trailer(page.key, data), ids)

    def write(self, page: TierPage, value: Value, *, damaged: bool) -> bool:
        """Copy a value to a page, if its trailer is right."""
        worker, data, ids = self.worker, value.data, value.ids
        if damaged:
            worker.counts["tier_value_damaged"] += 1
            data, ids = data[:-1] + bytes([data[-1] ^ 1]), [*ids[:-1], 0]
        if not SEALER.is_intact(page.key, data, value.trailer):
            return False
        size, slot_bytes = len(ids), len(data) // len(ids)
        # A page that the request was to load in part is written whole; the request knows only its own part.
        sequence, known = worker.loader(page.group, page.page), size
        if sequence is not None:
            known = worker.loaded_slots(sequence, page.group, page.page)
        states = bytes([DURABLE]) * known
        worker.sanitizer.steps.landed(sequence or "-", page.group, page.page, 0, ids[:known], states, "tier")
        slots = [data[at : at + slot_bytes] for at in range(0, len(data), slot_bytes)]
        worker.device.memory[worker.layout.arena_of[page.group]][page.page][:known] = slots[:known]
        return True

    def fate(self, page: TierPage) -> LoadFate:
        """Draw what happens to a load, by the page's key and by how often it was loaded."""
        worker = self.worker
        self._times[page.key] += 1
        fate = load_fate(worker.scenario, page.key.hex(), f"{worker.engine}:{self._times[page.key]}")
        worker.counts["tier_load_late"] += fate.delay > worker.driver.limits.tier_s
        return fate

    def note_failure(self, page: TierPage) -> None:
        counts, layout = self.worker.counts, self.worker.layout
        counts["tier_load_failed"] += 1
        slides = layout.groups[page.group].kind.slides
        counts["draft_window_load_failed"] += slides and page.group in layout.draft_groups

    def put_delay(self, page: TierPage) -> int:
        return int(5 * chance(self.worker.scenario.seed, "put", page.key))


class VirtualCopier:
    """The thread that copies between a worker's device and its host: `transfer.tiers.host.PageCopier`."""

    def __init__(self, memory: PageMemory, at: Callable[[int, Callable[[], None]], None], probability: float) -> None:
        self._memory = memory
        self._at = at
        self._probability = probability
        self._ended: list[CopyEnded] = []

    def copy_out(self, number: int, pages: Sequence[TierPage]) -> None:
        values: list[Value | None] = []

        def copy() -> None:
            page = pages[len(values)]
            copied = chance(self._memory.worker.scenario.seed, "tier", HOST, page.key) < self._probability
            values.append(self._memory.read(page) if copied else None)
            self._memory.worker.counts["host_tier_page"] += copied
            go_on()

        def go_on() -> None:
            if not self._memory.worker.alive:
                return
            if len(values) < len(pages):
                self._at(self._memory.put_delay(pages[len(values)]), copy)
            else:
                self._end(number, values)

        go_on()

    def copy_in(self, number: int, pages: Sequence[TierPage], values: Sequence[Value]) -> None:
        fates = [self._memory.fate(page) for page in pages]

        def copy() -> None:
            if not self._memory.worker.alive:
                return
            copied = []
            for page, value, fate in zip(pages, values, fates, strict=True):
                copied.append(self._memory.write(page, value, damaged=fate.failed))
                self._memory.worker.counts["tier_load"] += copied[-1]
                if not copied[-1]:
                    self._memory.note_failure(page)
            self._end(number, copied)

        self._at(max(fate.delay for fate in fates), copy)

    def _end(self, number: int, values: list[Value | None] | list[bool]) -> None:
        self._ended.append(CopyEnded(number, values))
        self._memory.worker.wake()

    def recycle(self, value: Value) -> None:
        """Nothing to keep."""

    def wake(self) -> None:
        self._memory.worker.wake()

    def poll(self) -> list[CopyEnded]:
        ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Copies end with their worker."""


class VirtualStore:
    """What all workers share: sealed values by key, first in, first out."""

    def __init__(self, *, capacity_pages: int, probability: float) -> None:
        self.probability = probability
        """Probability that the store takes a page: it may be full, or slow."""
        self.values: dict[bytes, Value] = {}
        self.down = False
        """Whether its master is gone; it comes back empty."""
        self._capacity = capacity_pages

    def put(self, key: bytes, value: Value) -> None:
        self.values.setdefault(key, value)  # what is there stays
        while len(self.values) > self._capacity:
            del self.values[next(iter(self.values))]


class StoreClient:
    """A worker's access to the store: `transfer.tier.Tier`."""

    name = REMOTE
    is_local = False
    batch_max = 8
    keys_max = 16

    def __init__(self, memory: PageMemory, at: Callable[[int, Callable[[], None]], None], store: VirtualStore) -> None:
        self._memory = memory
        self._at = at
        self._store = store
        self._done: list[Done] = []

    def contains(self, key: bytes) -> bool:
        return False

    def touch(self, keys: Sequence[bytes]) -> None:
        """The store keeps what came last."""

    def look_up(self, number: int, keys: Sequence[bytes]) -> None:
        # What is found may be gone, and what is not may be there, by the time it is asked for.
        found = tuple(key in self._store.values for key in keys)
        late = chance(self._memory.worker.scenario.seed, "look-up", *keys[:1], number)
        delay = int(4 * late) if late < 0.9 else 20
        self._memory.worker.counts["tier_look_up_late"] += late >= 0.9
        self._at(delay, lambda: self._end(number, found if not self._store.down else (False,) * len(keys)))

    def put(self, number: int, pages: Sequence[TierPage]) -> None:
        def copy() -> None:
            stored = []
            for page in pages if self._memory.worker.alive else ():
                seed = self._memory.worker.scenario.seed
                taken = not self._store.down and chance(seed, "tier", REMOTE, page.key) < self._store.probability
                if taken:
                    self._store.put(page.key, self._memory.read(page))
                stored.append(taken)
                self._memory.worker.counts["remote_tier_page"] += taken
            self._end(number, tuple(stored))

        self._at(max(map(self._memory.put_delay, pages)), copy)

    def get(self, number: int, pages: Sequence[TierPage]) -> None:
        fates = [self._memory.fate(page) for page in pages]

        def copy() -> None:
            loaded, refused = [], 0
            for page, fate in zip(pages, fates, strict=True) if self._memory.worker.alive else ():
                value = None if self._store.down else self._store.values.get(page.key)
                intact = value is not None and self._memory.write(page, value, damaged=fate.failed)
                if value is not None and not intact:
                    refused += 1
                    del self._store.values[page.key]
                self._memory.worker.counts["tier_load"] += intact
                if not intact:
                    self._memory.note_failure(page)
                loaded.append(intact)
            self._end(number, tuple(loaded), refused)

        self._at(max(fate.delay for fate in fates), copy)

    def _end(self, number: int, outcomes: tuple[bool, ...], refused: int = 0) -> None:
        if self._memory.worker.alive:
            self._done.append(Done(number, outcomes, refused))
            self._memory.worker.wake()

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def clear(self) -> None:
        """What others share stays."""

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """The store goes on without this worker."""


class SimTierWatch(TierWatch):
    """Tells a worker's checker about tiers; which slots land is told by whatever copies them."""

    _sanitizer: WatchingSanitizer

    def offered(self, tier: CacheTier, new: NewPage, *, wanted: bool) -> None:
        super().offered(tier, new, wanted=wanted)
        self._sanitizer.check_tier(tier, new, wanted=wanted)

    def loaded(self, sequence: str, load: Load) -> None:
        """The slots were reported when they landed, with the identities that they had when they were stored."""


def tiers_of(worker: Worker, layout: KVLayout, store: VirtualStore | None) -> list[CacheTier]:
    """Returns the tiers behind a worker's device, the nearest first."""
    scenario, memory, at, tiers = worker.scenario, PageMemory(worker), worker.world.at, []
    if scenario.host_probability > 0:
        page_bytes = [spec.page_bytes for spec in layout.groups]
        copier = VirtualCopier(memory, at, scenario.host_probability)
        host = HostTier(copier, page_bytes=page_bytes, capacity_bytes=HOST_PAGES * max(page_bytes))
        tiers.append(CacheTier(host, layout, Retention.of(scenario.host_retention)))
    if store is not None:
        tiers.append(CacheTier(StoreClient(memory, at, store), layout, Retention.of(scenario.tier_retention)))
    return tiers
