"""One simulated worker: the real scheduler and KV manager, the sanitizer, and a fake device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.manager import KVManager
from outrider.kv.observer import Hit
from outrider.kv.retention import Marks, Retention
from outrider.sanitizer import Mode, Sanitizer
from outrider.sanitizer.kept import ExpectedKept
from outrider.scheduler import Role, Scheduler, StepPlan, Update, Verdict
from outrider.scheduler.scheduler import Abandoned
from outrider.tools.sim.device import FakeDevice
from outrider.tools.sim.scenario import Scenario
from outrider.tools.sim.tier import HOST, FakeTier
from outrider.transfer.connector import LeaseBook

LEASE_TICKS = 40


class NewPage(NamedTuple):
    """A page that a device has published, and that further tiers may take over."""

    group: int
    page_number: int
    page: int
    key: bytes
    marks: Marks
    ends: tuple[int, ...]
    """The ends that the marks should be made of."""
    sequence: str


class WatchingSanitizer(Sanitizer):
    """A sanitizer that also records hits and pages that further tiers may take over."""

    def __init__(self, layout: KVLayout, config: KVConfig, *, mode: Mode) -> None:
        super().__init__(layout, config, mode=mode)
        self.hits: list[tuple[str, int]] = []
        self.hit_mismatches = 0
        self._kept_in: dict[str, ExpectedKept] = {}
        self.ends_kept = 0
        self.shared_prefixes_marked = 0
        self.media_hits = 0
        self.adapter_hits = 0
        self.new_pages: list[NewPage] = []

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
        ends = self._ends.get(sequence.id, ())
        self.new_pages.append(NewPage(group, page_number, page, key, sequence.marks, ends, sequence.id))

    def admitted(self, sequence: SequenceKV) -> None:
        super().admitted(sequence)
        # One mark is the prompt's own end.
        self.shared_prefixes_marked += any(sequence.hit < mark < len(sequence.tokens) for mark in sequence.marks[:-1])

    def end_kept(self, sequence: SequenceKV) -> None:
        super().end_kept(sequence)
        self.ends_kept += 1

    def check_tier(self, tier: FakeTier, new: NewPage, *, wanted: bool) -> None:
        """I9: a tier wants exactly those pages that a hit may need from it."""
        if tier.name not in self._kept_in:
            self._kept_in[tier.name] = ExpectedKept(self.layout, tier.retention)
        kept = self._kept_in[tier.name]
        allowed = kept.may_keep if wanted else lambda *page: not kept.must_keep(*page)
        if not allowed(new.group, new.page_number, new.ends):
            self._fail(
                "I9",
                f"a page that {'no hit can need is' if wanted else 'a hit needs is not'} kept in the {tier.name} tier",
                request=new.sequence,
                group=new.group,
                position=new.page_number * self.layout.groups[new.group].page_tokens,
                page=new.page,
            )


@dataclass
class InFlight:
    """A step that is planned, and has run if it has a verdict."""

    plan: StepPlan
    verdict: Verdict | None = None


@dataclass
class Worker:
    name: str
    engine: str
    scenario: Scenario
    layout: KVLayout
    role: Role
    on_stale_draft: Callable[[str, int], None]
    on_plan: Callable[[StepPlan, Verdict], None]
    remote_tier: FakeTier | None = None
    alive: bool = True
    interruption: str | None = None
    """When the next step is interrupted: "before" it runs or "after"; None if it is not."""
    steps: int = 0
    preemptions_while_loading: int = 0
    flying: list[InFlight] = field(default_factory=list)

    def __post_init__(self) -> None:
        scenario = self.scenario
        config = scenario.kv_config(self.layout, peer=self.role is Role.PREFILL)
        self.sanitizer = WatchingSanitizer(self.layout, config, mode=Mode.RAISE)
        self.tiers = self._tiers()
        self.kv = KVManager(self.layout, config, observer=self.sanitizer, tiers=self.tiers)
        self.sanitizer.bind(self.kv)
        self.sanitizer.tier_holds = lambda group, identity: any(t.holds_identity(group, identity) for t in self.tiers)
        self.scheduler = Scheduler(scenario.scheduler_config(self.role), self.kv)
        self.device = FakeDevice(
            self.layout,
            config,
            self.sanitizer,
            acceptance=scenario.acceptance,
            seed=scenario.seed,
            on_stale_draft=self.on_stale_draft,
        )
        self.leases = LeaseBook(duration=LEASE_TICKS)

    def _tiers(self) -> tuple[FakeTier, ...]:
        """Returns the tiers behind the device, the nearest first."""
        scenario, tiers = self.scenario, []
        if scenario.host_probability > 0:
            retention = Retention.of(scenario.host_retention)
            tiers.append(
                FakeTier(HOST, self.layout, retention, probability=scenario.host_probability, capacity_pages=60)
            )
        return (*tiers, self.remote_tier) if self.remote_tier is not None else tuple(tiers)

    # ---- the two halves of an iteration, with events in between ------------------------------------

    def plan(self) -> None:
        preemptions, loading = self.scheduler.num_preemptions, self.scheduler.num_loading
        self.flying.append(InFlight(self.scheduler.schedule()))
        if loading:
            self.preemptions_while_loading += self.scheduler.num_preemptions - preemptions

    def advance(self) -> tuple[list[Update], Abandoned | None]:
        """Commit the step that has run, and run the one that is planned, or abandon it if it is interrupted."""
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
            self.on_plan(flight.plan, flight.verdict)
            self.steps += 1
        if self.interruption is None:
            return updates, None
        self.interruption = None
        del self.flying[0]
        abandoned = self.scheduler.abandon(flight.plan)
        self.sanitizer.check_conservation()
        return updates, abandoned

    def commit(self) -> list[Update]:
        flight = self.flying.pop(0)
        assert flight.verdict is not None
        updates = self.scheduler.commit(flight.plan, flight.verdict)
        for row in flight.plan.scheduled:
            request = self.scheduler.requests.get(row.sequence_id)
            if request is not None and request.epoch == row.epoch:
                rows_ahead = sum(ahead.num_rows for ahead in request.flight)
                self.sanitizer.check_surplus(request.kv, k=request.k, rows_ahead=rows_ahead)
        if any(update.finish for update in updates):
            self.sanitizer.check_conservation()
        return updates

    def check_empty(self) -> int:
        """Returns the number of pages that are still held once all requests have ended and the cache is reset."""
        self.sanitizer.check_conservation()
        self.kv.reset_cache()
        return sum(arena.num_pages - 1 - arena.num_free for arena in self.kv.pool.arenas)
