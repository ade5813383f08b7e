"""One simulated worker: the real scheduler and KV manager, the sanitizer, and a fake device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.manager import KVManager
from outrider.kv.observer import Hit
from outrider.sanitizer import Mode, Sanitizer
from outrider.scheduler import Role, Scheduler, StepPlan, Update, Verdict
from outrider.sim.device import FakeDevice
from outrider.sim.scenario import Scenario
from outrider.sim.tier import FakeTier
from outrider.transfer.connector import LeaseBook

LEASE_TICKS = 40


class WatchingSanitizer(Sanitizer):
    """The sanitizer, which also keeps a record of hits and of pages that a second tier may take over."""

    def __init__(self, layout: KVLayout, config: KVConfig, *, mode: Mode) -> None:
        super().__init__(layout, config, mode=mode)
        self.hits: list[tuple[str, int]] = []
        self.hit_mismatches = 0
        self.media_hits = 0
        self.adapter_hits = 0
        self.new_pages: list[tuple[int, int, bytes]] = []

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
        self.new_pages.append((group, page, key))


@dataclass
class InFlight:
    """A step that has run, or is about to."""

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
    tier: FakeTier | None = None
    alive: bool = True
    steps: int = 0
    flying: list[InFlight] = field(default_factory=list)

    def __post_init__(self) -> None:
        scenario = self.scenario
        config = scenario.kv_config(self.layout, peer=self.role is Role.PREFILL)
        self.sanitizer = WatchingSanitizer(self.layout, config, mode=Mode.RAISE)
        self.kv = KVManager(
            self.layout, config, observer=self.sanitizer, tiers=(self.tier,) if self.tier is not None else ()
        )
        self.sanitizer.bind(self.kv)
        if self.tier is not None:
            self.sanitizer.tier_holds = self.tier.holds_identity
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

    @property
    def idle(self) -> bool:
        """Nothing to do until something arrives."""
        return not self.flying and not self.scheduler.has_work

    # ---- the two halves of an iteration, with events in between ------------------------------------

    def plan(self) -> None:
        self.flying.append(InFlight(self.scheduler.schedule()))

    def advance(self) -> list[Update]:
        """Commit the step that has run, and run the one that is planned."""
        updates: list[Update] = []
        if self.flying[0].verdict is not None:
            updates = self.commit()
        if self.flying:
            flight = self.flying[0]
            if self.scenario.step_in_flight:
                flight.plan = self.scheduler.correct(flight.plan)
            flight.verdict = self.device.run(flight.plan)
            self.on_plan(flight.plan, flight.verdict)
            self.steps += 1
        return updates

    def commit(self) -> list[Update]:
        flight = self.flying.pop(0)
        assert flight.verdict is not None
        updates = self.scheduler.commit(flight.plan, flight.verdict)
        for row in flight.plan.rows:
            request = self.scheduler.requests.get(row.request)
            if request is not None and request.epoch == row.epoch:
                rows_ahead = sum(ahead.num_rows for ahead in request.flight)
                self.sanitizer.check_surplus(request.kv, k=request.k, rows_ahead=rows_ahead)
        if any(update.finish for update in updates):
            self.sanitizer.check_conservation()
        return updates

    def check_empty(self) -> int:
        """With every request gone: pages that are still held after the cache is reset."""
        self.sanitizer.check_conservation()
        self.kv.reset_cache()
        return sum(arena.num_pages - 1 - arena.num_free for arena in self.kv.pool.arenas)
