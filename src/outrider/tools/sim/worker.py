"""One simulated worker: the real scheduler, KV manager and transfer driver, the sanitizer, a fake device and link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from outrider.errors import InvariantViolation
from outrider.events.servable import ServablePages
from outrider.kv.footprint import Proposing
from outrider.kv.intervals import Interval, SlotRun
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import Load, SequenceKV
from outrider.kv.manager import KVManager
from outrider.kv.observer import Hit
from outrider.kv.publication import NewPage
from outrider.sanitizer import Mode, Sanitizer
from outrider.sanitizer.announced import ExpectedAnnounced
from outrider.sanitizer.kept import ExpectedKept
from outrider.scheduler import Scheduler, State, StepPlan, Update, Verdict
from outrider.scheduler.pacing.costs import StepShape, StepTimes
from outrider.scheduler.pacing.pacer import Pacer
from outrider.tools.sim.device import FakeDevice
from outrider.tools.sim.link import VirtualLink
from outrider.tools.sim.oracle import chance
from outrider.tools.sim.paced import MOST_LOOKED_UP, PacedRunner
from outrider.tools.sim.tier import SimTierWatch, VirtualStore, tiers_of
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.driver import TransferDriver
from outrider.transfer.lending import Lender
from outrider.transfer.offers import OfferedGroup
from outrider.transfer.records import Fetched, FirstToken
from outrider.transfer.tickets import ClusterKey, Ticket

if TYPE_CHECKING:
    from outrider.tools.sim.world import World

CLUSTER_KEY = ClusterKey("the key of all simulated workers")
SKEW_TICKS = 8
"""Largest difference between the clocks of two workers."""


class WatchingSanitizer(Sanitizer):
    """A sanitizer that also records hits, and checks what tiers take over."""

    def __init__(self, layout: KVLayout, config: KVConfig, *, mode: Mode) -> None:
        super().__init__(layout, config, mode=mode)
        self.hits: list[tuple[str, int]] = []
        self.hit_mismatches = 0
        self._kept_in: dict[str, ExpectedKept] = {}
        self.ends_kept = 0
        self.shared_prefixes_marked = 0
        self.media_hits = 0
        self.adapter_hits = 0
        self.ends_of_new: dict[tuple[int, int, bytes], tuple[int, ...]] = {}
        """The ends of its sequence, of which the marks should be made, of each page when it was published."""
        self._not_offered: dict[tuple[int, int, bytes], str] = {}
        """Sequences of pages that were published and not offered to tiers since."""
        self.servable = ExpectedAnnounced(layout, self._divisible)

    def admitting(self, sequence: SequenceKV, hit: Hit, *, use_cache: bool, may_draft: bool) -> None:
        assert self._manager is not None
        self.hits.append((sequence.id, hit.end))
        self.media_hits += any(item.start < hit.end for item in sequence.chain.media)
        self.adapter_hits += bool(sequence.namespace[0]) and hit.end > 0
        limit = len(sequence.tokens) - 1 if use_cache else 0
        alone, _views = self._manager.search(sequence, limit, draft=False)
        self.hit_mismatches += alone.end != hit.end
        super().admitting(sequence, hit, use_cache=use_cache, may_draft=may_draft)

    def published(self, sequence: SequenceKV, group: int, page_number: int, page: int, key: bytes) -> None:
        super().published(sequence, group, page_number, page, key)
        self.ends_of_new[group, page, key] = self._ends.get(sequence.id, ())
        self._not_offered[group, page, key] = sequence.id
        self.servable.published(group, page, key, self._hashes(sequence), page_number)

    def evicted(self, arena: int, page: int) -> None:
        super().evicted(arena, page)
        self.servable.evicted(arena, page)

    def cache_reset(self) -> None:
        super().cache_reset()
        self.servable.clear()

    def started_over(self) -> None:
        super().started_over()
        self.servable.clear()

    def admitted(self, sequence: SequenceKV) -> None:
        super().admitted(sequence)
        # One mark is the prompt's own end.
        self.shared_prefixes_marked += any(sequence.hit < mark < len(sequence.tokens) for mark in sequence.marks[:-1])

    def end_kept(self, sequence: SequenceKV) -> None:
        super().end_kept(sequence)
        self.ends_kept += 1

    def check_tier(self, tier: CacheTier, new: NewPage, *, wanted: bool) -> None:
        """I9: a tier wants exactly those pages that a hit may need from it."""
        self._not_offered.pop((new.group, new.page, new.key), None)
        if tier.name not in self._kept_in:
            self._kept_in[tier.name] = ExpectedKept(self.layout, tier.retention)
        kept = self._kept_in[tier.name]
        allowed = kept.may_keep if wanted else lambda *page: not kept.must_keep(*page)
        if not allowed(new.group, new.page_number, self.ends_of_new[new.group, new.page, new.key]):
            self._fail(
                "I9",
                f"a page that {'no hit can need is' if wanted else 'a hit needs is not'} kept in the {tier.name} tier",
                request=new.sequence,
                group=new.group,
                position=new.page_number * self.layout.groups[new.group].page_tokens,
                page=new.page,
            )

    def check_offered(self) -> None:
        """I9: every page that was published has been offered to the tiers."""
        not_offered, self._not_offered = self._not_offered, {}
        for (group, page, _key), sequence in not_offered.items():
            self._fail("I9", "a page was published that no tier heard of", request=sequence, group=group, page=page)


@dataclass
class InFlight:
    """A step that is planned, and has run if it has a verdict."""

    plan: StepPlan
    verdict: Verdict | None = None
    work: tuple[StepShape, StepTimes] | None = None
    """What a step of a paced worker did, and how long that took."""


class Worker:
    def __init__(self, world: World, name: str, engine: str, endpoint: str, store: VirtualStore | None) -> None:
        self.world = world
        self.name = name
        self.engine = engine
        self.scenario = scenario = world.scenario
        self.counts = world.result.faults
        self.layout = scenario.layout(name)
        self.alive = True
        self.interruption: str | None = None
        """When the next step is interrupted: "planning", "before" it runs or "after"; None if it is not."""
        self.steps = 0
        self.preemptions_while_loading = 0
        self.flying: list[InFlight] = []
        self.stopped_until = 0
        self.alarm: int | None = None
        """The tick at which the world wakes this worker, if nothing does before."""
        self.tickets: dict[str, Ticket] = {}
        """What each sequence that starts from a peer's KV was asked for with."""
        self.excused: set[str] = set()
        """Sequences whose ticket was used before: the release of its first use may reach the prefill worker late."""
        self.started: set[str] = set()
        """Sequences that start from a peer's KV, and have had rows."""
        config = scenario.kv_config(self.layout, name)
        self.sanitizer = WatchingSanitizer(self.layout, config, mode=Mode.RAISE)
        self.tiers = tiers_of(self, self.layout, store)
        self.events = ServablePages(self.layout)
        self.announced: set[tuple[int, bytes]] = set()
        """What routers have been told of, as (group, key)."""
        self.kv = KVManager(self.layout, config, observer=self.sanitizer, tiers=self.tiers, listener=self.events)
        self.sanitizer.bind(self.kv)
        self.paced = self._paced_runner() if scenario.paced else None
        pacer = None if self.paced is None else self.paced.pacer
        self.scheduler = Scheduler(scenario.scheduler_config(scenario.role(name)), self.kv, pacer=pacer)
        if self.paced is not None:
            self.paced.record_of = self.scheduler.requests.get
        self.device = FakeDevice(
            self.layout,
            config,
            self.sanitizer,
            acceptance=scenario.acceptance,
            seed=scenario.seed,
            on_stale_draft=world.stale_draft,
            paced=self.paced,
        )
        self._make_driver(endpoint)

    def _make_driver(self, endpoint: str) -> None:
        skew = int(SKEW_TICKS * chance(self.scenario.seed, "clock", self.engine))
        clocks = {"clock": lambda: float(self.world.now), "time_of_day": lambda: float(self.world.now + skew)}
        lender = Lender(
            self.scheduler,
            engine=self.engine,
            key=CLUSTER_KEY,
            limits=self.scenario.limits,
            digest_slots=self._digest_held if self.scenario.compare_bytes else None,
            on_ended=self.wake,
            **clocks,
        )
        self.link = VirtualLink(self, self.world.network, lender.desk, endpoint)
        self.driver = TransferDriver(
            self.scheduler,
            self.link,
            lender,
            tiers=self.tiers,
            checks=ArrivalChecks(self),
            tier_checks=SimTierWatch(self.sanitizer, self.kv, self.tiers),
            vocab_size=None,
            **clocks,
        )

    def _paced_runner(self) -> PacedRunner:
        footprint, most = self.layout.footprint, max(request.k for request in self.scenario.requests)
        asks_drafter = footprint.proposing is not Proposing.NOTHING and most > 0
        if footprint.proposing is Proposing.CHAIN:
            sizes = tuple(range(1, most + 1))
        else:
            sizes = tuple(sorted({most, *(rows - 1 for rows in footprint.block_sizes if 1 < rows <= most)}))
        pacer = Pacer(footprint, sizes=sizes if asks_drafter else (), lookup=MOST_LOOKED_UP)
        return PacedRunner(self.scenario.seed, pacer, footprint, self.counts)

    def reset_cache(self) -> None:
        self.kv.reset_cache()
        if self.paced is not None:
            self.paced.reset()

    def wake(self) -> None:
        self.world.wake(self)

    def store(self) -> None:
        """Let the tiers take over what has been published."""
        self.driver.offloading.store()
        if self.tiers:
            self.sanitizer.check_offered()

    @property
    def stopped_for(self) -> int:
        """Number of ticks until this worker goes on; 0 if it is not stopped."""
        return max(0, self.stopped_until - self.world.now)

    # ---- hand-offs ---------------------------------------------------------------------------------

    def _digest_held(self, group: int, held: OfferedGroup, interval: Interval) -> bytes:
        return self.digest(group, held.pages, interval)

    def digest(self, group: int, pages: Sequence[int], interval: Interval) -> bytes:
        memory, size = self.device.memory[self.layout.arena_of[group]], self.layout.groups[group].page_tokens
        slots = [memory[pages[at // size]][at % size] for at in range(interval.start, interval.end)]
        return blake2b(b"".join(slots), digest_size=16).digest()

    def hand_over(self, sequence: str, token: int, binding: bytes) -> str | None:
        request = self.device.requests[sequence]
        return self.driver.hand_over(
            sequence, binding=binding, first=FirstToken(token, request.seed, drafts=tuple(request.drafts))
        )

    def adopt(self, fetched: Fetched) -> None:
        """Let the device start where the prefill worker's left off."""
        request = self.device.requests.get(fetched.sequence)
        record = self.scheduler.requests.get(fetched.sequence)
        if fetched.offer is not None and request is not None and (record is None or record.spec.n == 1):
            request.tokens.append(fetched.offer.first_token)
            request.drafts = list(fetched.offer.drafts)
            self.counts["drafts_carried"] += bool(request.drafts)

    def lease_of(self, sequence: str) -> bytes:
        """Returns the lease under which a sequence reads; empty if there is none."""
        ticket = self.tickets.get(sequence)
        return ticket.lease if ticket is not None else b""

    def peer_cut_off(self, endpoint: str) -> None:
        """Note that other hand-offs from a peer may fail, since a read that did not end made this worker fence it."""
        for sequence, ticket in self.tickets.items():
            if ticket.endpoint != endpoint:
                continue
            request = self.scheduler.requests.get(sequence)
            if request is not None and request.state in (State.FETCHING, State.WAITING):
                self.world.network.trouble(ticket.lease)
            else:
                self.world.network.trouble(ticket.lease, target=self.link.is_reading_target(sequence))

    def holder(self, group: int, page: int) -> str:
        """Returns the loading sequence that holds a page."""
        for name, request in self.scheduler.roster.loading.items():
            if page in request.kv.groups[group].pages:
                return name
        raise AssertionError(f"a read into page {page}, which no sequence waits for")

    def loader(self, group: int, page: int) -> str | None:
        """Returns the loading sequence that holds a page; None if the page was given up."""
        held = (name for name, r in self.scheduler.roster.loading.items() if page in r.kv.groups[group].pages)
        return next(held, None)

    def loaded_slots(self, sequence: str, group: int, page: int) -> int:
        """Returns how many slots of a page its sequence loads."""
        kv, size = self.scheduler.requests[sequence].kv, self.layout.groups[group].page_tokens
        start = kv.groups[group].pages.index(page) * size
        return next(load.interval.size for load in kv.loads if (load.group, load.interval.start) == (group, start))

    def is_loading(self, sequence: str) -> bool:
        return sequence in self.scheduler.roster.loading

    def is_running(self, sequence: str) -> bool:
        """Whether a sequence has all that it starts from."""
        request = self.scheduler.requests.get(sequence)
        return request is not None and request.state in (State.PREFILLING, State.DECODING)

    # ---- the two halves of an iteration, with events in between ------------------------------------

    def plan(self) -> None:
        preemptions, loading = self.scheduler.num_preemptions, self.scheduler.num_loading
        if self.paced is not None:
            self.paced.set_forced(self.engine, self.steps)
        self.flying.append(InFlight(self.scheduler.schedule()))
        self.driver.start_loads()
        for name, request in self.scheduler.roster.loading.items():
            if any(load.key is not None for load in request.kv.loads):
                # What the hit search found there is missing if the load fails, and the hand-off cannot be whole.
                self.world.network.trouble(self.lease_of(name))
        if loading:
            self.preemptions_while_loading += self.scheduler.num_preemptions - preemptions

    def advance(self) -> tuple[list[Update], list[str] | None]:
        """Commit the step that has run, and run the one that is planned, or abandon it if it is interrupted. Returns
        the sequences that this ended, or None if nothing was abandoned."""
        updates: list[Update] = []
        if self.flying[0].verdict is not None:
            updates = self.commit()
        if not self.flying:
            return updates, None
        flight = self.flying[0]
        if self.scenario.step_in_flight:
            flight.plan = self.scheduler.correct(flight.plan)
        if self.interruption != "before":
            flight.verdict = self.device.run(flight.plan)
            if self.paced is not None:
                flight.work = self.paced.work(self.engine, flight.plan)
            self.world.record(self, flight.plan, flight.verdict)
            self.steps += 1
        if self.interruption is None:
            return updates, None
        self.interruption = None
        del self.flying[0]
        self.world.interrupted(self)
        ended = self.scheduler.abandon(flight.plan)
        self.sanitizer.check_conservation()
        return updates, ended

    def commit(self) -> list[Update]:
        flight = self.flying.pop(0)
        assert flight.verdict is not None
        updates = self.scheduler.commit(flight.plan, flight.verdict)
        if self.paced is not None and flight.work is not None:
            shape, times = flight.work
            self.paced.pacer.observe(shape, times, tokens=sum(len(update.tokens) for update in updates))
        for row in flight.plan.scheduled:
            request = self.scheduler.requests.get(row.sequence_id)
            if request is not None and request.epoch == row.epoch:
                rows_ahead = sum(ahead.num_rows for ahead in request.flight)
                self.sanitizer.check_surplus(request.kv, k=request.k, rows_ahead=rows_ahead)
        if any(update.finish for update in updates):
            self.sanitizer.check_conservation()
            self.check_announced()
        return updates

    def check_announced(self) -> None:
        """I13: routers have been told of exactly those pages that can serve a hit, and each once."""
        changes = self.events.take()
        if changes.cleared:
            self.announced.clear()
        self.counts["announcement_withdrawn"] += len(changes.removed)
        if not self.announced.issuperset(changes.removed):
            raise InvariantViolation("I13", "I13 broken: a page is withdrawn that was not announced")
        self.announced.difference_update(changes.removed)
        for page in changes.stored:
            is_full = not self.layout.groups[page.group].kind.slides
            if (page.group, page.key) in self.announced or (
                is_full and page.parent is not None and (page.group, page.parent) not in self.announced
            ):
                raise InvariantViolation("I13", "I13 broken: a page is announced twice, or before the one it follows")
            self.announced.add((page.group, page.key))
        self.sanitizer.servable.check(self.announced)

    def forget_gone(self) -> None:
        """Let the device and the checker forget sequences that the scheduler does not know any more."""
        known = self.scheduler.requests
        gone = [name for name in self.device.requests if name not in known]
        if gone:
            planned = {row.sequence_id for flight in self.flying for row in flight.plan.scheduled}
            for name in gone:
                if name not in planned:
                    self.device.forget(name)

    def check_empty(self) -> int:
        """Returns the number of pages that are still held once all requests have ended and the cache is reset."""
        self.sanitizer.check_conservation()
        self.check_announced()
        self.kv.reset_cache()
        self.check_announced()
        return sum(arena.num_pages - 1 - arena.num_free for arena in self.kv.pool.arenas)


class ArrivalChecks:
    """What the driver tells a worker's checker: `transfer.records.TransferChecks`. The link has told the sanitizer
    already which slots landed."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def compares_bytes(self) -> bool:
        return self._worker.scenario.compare_bytes

    def digest(self, sequence: str, load: Load) -> bytes:
        pages = self._worker.kv.sequences[sequence].groups[load.group].pages
        return self._worker.digest(load.group, pages, load.interval)

    def arrived(self, sequence: str, load: Load, runs: Sequence[SlotRun], sender: str) -> None:
        self._worker.counts["interval_imported"] += 1

    def differs(self, sequence: str, load: Load, sender: str) -> None:
        self._worker.counts["damage_noticed"] += 1
