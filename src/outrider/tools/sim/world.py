"""The world of one scenario: workers, a network, a router and faults on a virtual clock.

Everything that happens is an event at a tick; events at one tick happen in the order they were made. All
chance comes from the scenario's seed and the names of things, never from an order of draws, so that
leaving one request out moves nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush

from outrider.errors import InvariantViolation
from outrider.scheduler import LoadFailure, StepPlan, Update, Verdict
from outrider.tools.sim.device import DeviceRequest
from outrider.tools.sim.hand_off_checks import HandOffChecks
from outrider.tools.sim.network import Network
from outrider.tools.sim.oracle import FakeModel, Inputs, Reference, chance
from outrider.tools.sim.router import Leg, Router
from outrider.tools.sim.scenario import STOP_TOKENS, FaultDraw, Scenario, phase_fault
from outrider.tools.sim.tier import VirtualStore
from outrider.tools.sim.worker import Worker

MAX_STEPS = 6_000
MAX_TICKS = 40_000
"""Nothing that is limited takes as long, however many limits follow each other."""
IDLE_TICKS = 400
"""More than a message can be late, a worker can stop, and a lease, the reads under it and a fence can then take."""


class WrongOutput(Exception):
    """I7: a request got a token that the target alone would not have written, or no end that it should have."""


class Stuck(Exception):
    """I10: requests or hand-offs are left, and nothing happens any more, or not within the limits."""


@dataclass(frozen=True)
class Failure:
    kind: str
    """One of violation, wrong_output, leak, hit_mismatch, stuck and crash."""
    invariant: str | None
    message: str
    step: int


@dataclass
class Result:
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None
    leaked_pages: int = 0
    hit_mismatches: int = 0
    hits: list[tuple[str, int]] = field(default_factory=list)
    digest: str = ""
    finished: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0
        self.result = Result()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_count = 0
        self._hash = blake2b(digest_size=16)
        self._incarnations: Counter[str] = Counter()
        self._references: dict[tuple[str, str, int], Reference] = {}
        self._ticking: set[str] = set()
        self._listeners: list[Callable[[StepPlan, Verdict], None]] = []
        self._drained_steps = 0
        self._done_at: int | None = None
        """The tick at which the last request ended."""
        self._awaited: list[FaultDraw] = []
        """Faults that wait for a phase of their request's hand-off."""
        self.network = Network(scenario, scenario.limits, self.result.faults, self.at, lambda: self.now)
        self.hand_offs = HandOffChecks(scenario, self.network, self.result.faults)
        self.store = self._shared_store() if scenario.tier_probability > 0 else None
        self.router = Router(self)
        self.workers: dict[str, Worker] = {}
        for name in scenario.workers:
            self._make(name, f"virtual:{name}")

    # ---- set-up ------------------------------------------------------------------------------------

    def _make(self, name: str, endpoint: str, *, after: int = 0) -> None:
        """Start a worker, whose link takes messages after some ticks."""
        self._incarnations[name] += 1
        worker = self.workers[name] = Worker(self, name, f"{name}.{self._incarnations[name]}", endpoint, self.store)
        if after:
            self.at(after, lambda: self.network.open(worker.link) if worker.alive else None)
        else:
            self.network.open(worker.link)

    def _shared_store(self) -> VirtualStore:
        scenario = self.scenario
        roomy = chance(scenario.seed, "tier") < 0.5
        store = VirtualStore(probability=scenario.tier_probability, capacity_pages=400 if roomy else 24)
        if chance(scenario.seed, "store dies") < 0.3:
            start = int(60 * chance(scenario.seed, "store dies at"))
            self.at(start, lambda: self._set_store(store, down=True))
            self.at(start + 1 + int(20 * chance(scenario.seed, "store returns")), lambda: self._set_store(store))
        return store

    def _set_store(self, store: VirtualStore, *, down: bool = False) -> None:
        """End the store's master, or start it again; what was stored is gone either way."""
        self.result.faults["store_death"] += down
        store.down = down
        store.values.clear()

    def watch(self, listener: Callable[[StepPlan, Verdict], None]) -> None:
        """Call the listener for every step that has run."""
        self._listeners.append(listener)

    def record(self, worker: Worker, plan: StepPlan, verdict: Verdict) -> None:
        """Note a step that has run."""
        for listener in self._listeners:
            listener(plan, verdict)
        self._hash.update(repr((plan.step, plan.scheduled, verdict.tokens, verdict.proposed)).encode())
        self.result.faults["chunking"] += sum(row.num_rows > 1 and not row.samples for row in plan.scheduled)
        self.result.faults["drafter_catching_up"] += sum(row.feed_to is not None for row in plan.scheduled)
        self.result.faults["page_copy"] += len(plan.kv.copies)
        for row, tokens in zip(plan.scheduled, verdict.tokens, strict=True):
            self.hand_offs.row_ran(worker, row)
            if row.drafts:
                self.result.drafts += row.drafts
                self.result.accepted += len(tokens) - 1

    def stale_draft(self, request: str, position: int) -> None:
        raise WrongOutput(f"the drafter of {request} gathered the wrong context before position {position}")

    def at(self, delay: int, action: Callable[[], None]) -> None:
        self._event_count += 1
        heappush(self._events, (self.now + delay, self._event_count, action))

    # ---- running -----------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run to the end, or to the first failure."""
        try:
            self._start()
            self._loop()
            self._check_end()
        except InvariantViolation as violation:
            self._fail("violation", violation.invariant, str(violation))
        except WrongOutput as wrong:
            self._fail("wrong_output", "I7", str(wrong))
        except Stuck as stuck:
            self._fail("stuck", "I10", str(stuck))
        except Exception as crash:
            # A crash is a failure like any other: it is counted, traced and shrunk.
            self._fail("crash", None, f"{type(crash).__name__}: {crash}")
        result = self.result
        result.steps = self._total_steps()
        for worker in self.workers.values():
            self._collect(worker)
        result.digest = self._hash.hexdigest()
        if result.failure is None and result.hit_mismatches:
            self._fail("hit_mismatch", "I9", "the target's hit differs from the search without draft groups")
        return result

    def _total_steps(self) -> int:
        return self._drained_steps + sum(worker.steps for worker in self.workers.values())

    def _collect(self, worker: Worker) -> None:
        result, scheduler, counters = self.result, worker.scheduler, worker.driver.counters
        result.faults["preemption"] += scheduler.num_preemptions
        result.faults["page_shortage"] += scheduler.num_stalls
        result.faults["preemption_while_loading"] += worker.preemptions_while_loading
        result.faults["draft_groups_dropped"] += worker.kv.dropped_drafts
        result.faults["media_hit"] += worker.sanitizer.media_hits
        result.faults["adapter_hit"] += worker.sanitizer.adapter_hits
        result.faults["end_kept"] += worker.sanitizer.ends_kept
        result.faults["shared_prefix_marked"] += worker.sanitizer.shared_prefixes_marked
        result.faults["peer_without_drafter"] += counters.draft_groups_missing
        result.faults["handed_over"] += counters.handed_over
        result.faults["lease_expired"] += counters.leases_expired
        result.faults["fenced"] += counters.fences
        result.hit_mismatches += worker.sanitizer.hit_mismatches
        result.hits += worker.sanitizer.hits

    def _fail(self, kind: str, invariant: str | None, message: str) -> None:
        if self.result.failure is None:
            self.result.failure = Failure(kind, invariant, message, self._total_steps())

    def _start(self) -> None:
        self.router.start()
        for fault in self.scenario.faults:
            if fault.phase:
                self._awaited.append(fault)
            else:
                self.at(fault.at, lambda fault=fault: self._strike(fault.kind, fault.target))  # type: ignore[misc]

    def _loop(self) -> None:
        while self._events:
            tick, _order, action = heappop(self._events)
            self.now = max(self.now, tick)
            action()
            if self._awaited:
                self._await_phases()
            self._check_idle()
            if self._total_steps() > MAX_STEPS or self.now > MAX_TICKS:
                raise Stuck(f"after {self._total_steps()} steps and {self.now} ticks {self._left()}")

    def _check_idle(self) -> None:
        """I10: once all requests are done, nothing is held, on its way or in quarantine for longer than the limits."""
        if any(not order.done for order in self.router.orders.values()):
            self._done_at = None
            return
        if self._done_at is None:
            self._done_at = self.now
        late = self.now > self._done_at + IDLE_TICKS
        if late and any(not worker.driver.is_idle for worker in self.workers.values()):
            raise Stuck(f"{IDLE_TICKS} ticks after the last request had ended {self._left()}")

    def _left(self) -> str:
        """Returns what has not come to its end."""
        waiting = [name for name, order in self.router.orders.items() if not order.done]
        busy = [name for name, worker in self.workers.items() if not worker.driver.is_idle]
        return f"these requests are not done: {', '.join(waiting) or 'none'}; not idle: {', '.join(busy) or 'none'}"

    def _check_end(self) -> None:
        if any(not order.done for order in self.router.orders.values()):
            raise Stuck(f"nothing is left to happen, but {self._left()}")
        if any(not worker.driver.is_idle for worker in self.workers.values()):
            raise Stuck(f"nothing is left to happen, but KV is held, on its way or in quarantine: {self._left()}")
        leaked = sum(worker.check_empty() for worker in self.workers.values())
        self.result.leaked_pages = leaked
        if leaked:
            self._fail("leak", "I5", f"{leaked} page(s) are still held although every request has ended")

    # ---- workers -----------------------------------------------------------------------------------

    def wake(self, worker: Worker) -> None:
        """Start the iterations of a worker, each in two halves, plan and advance, with a tick between them."""
        if worker.engine in self._ticking or not worker.alive:
            return
        self._ticking.add(worker.engine)
        self.at(0, lambda: self._plan(worker))

    def _stopped(self, worker: Worker, action: Callable[[Worker], None]) -> bool:
        """Whether a worker cannot go on now; if it is stopped, the action is put off."""
        if worker.alive and worker.stopped_for:
            self.at(worker.stopped_for, lambda: action(worker))
            return True
        return not worker.alive

    def _plan(self, worker: Worker) -> None:
        if self._stopped(worker, self._plan):
            return
        self._take_answers(worker)
        if not worker.scheduler.has_work or worker.scheduler.only_loading:
            if worker.flying:
                self._settle(worker)
            else:
                self._ticking.discard(worker.engine)
                self._set_alarm(worker)
            return
        if worker.interruption == "planning" and not worker.flying:
            worker.interruption = None
            self.interrupted(worker)
            self._end_abandoned(worker, worker.scheduler.abandon(None))
            self._next_iteration(worker)
            return
        worker.plan()
        self.at(self._look_after_transfers(worker), lambda: self._advance(worker))

    def _look_after_transfers(self, worker: Worker) -> int:
        """Returns the ticks until the planned step runs. An engine that plans ahead may look after its transfers at any
        time until then, so that loads settle before the copies of their step have run."""
        slow = self.scenario.step_in_flight and chance(self.scenario.seed, "slow", worker.engine, self.now) < 0.3
        for tick in range(1, 4 if slow else 1):
            self.at(tick, lambda: None if self._halted(worker) else self._take_answers(worker))
        return 4 if slow else 1

    def _halted(self, worker: Worker) -> bool:
        return not worker.alive or worker.stopped_for > 0

    def _take_answers(self, worker: Worker) -> None:
        """Let a worker's driver take in what has happened, as an engine does before it plans a step."""
        for fetched in worker.driver.advance():
            worker.adopt(fetched)
            if fetched.offer is None:
                self.hand_offs.not_fetched(worker, fetched.sequence, fetched.reason)
        self.deliver(worker, worker.scheduler.take_updates())
        for settled in worker.driver.take_settled():
            self.hand_offs.settled(worker, settled.sequence, settled.reason)

    def _set_alarm(self, worker: Worker) -> None:
        """Wake an idle worker when its driver has something to do."""
        deadline_s = worker.driver.next_deadline_s
        if deadline_s is None:
            return
        tick = max(self.now + 1, int(deadline_s))
        if worker.alarm is not None and self.now < worker.alarm <= tick:
            return
        worker.alarm = tick

        def ring() -> None:
            if worker.alarm == tick:
                worker.alarm = None
            self.wake(worker)

        self.at(tick - self.now, ring)

    def _advance(self, worker: Worker) -> None:
        if self._stopped(worker, self._advance):
            return
        updates, abandoned = worker.advance()
        waits = not self.scenario.step_in_flight and abandoned is None
        if waits:
            self.at(1, lambda: self._settle(worker))
        self.deliver(worker, updates)
        if abandoned is not None:
            self._end_abandoned(worker, abandoned)
        if not waits:
            self._next_iteration(worker)

    def _settle(self, worker: Worker) -> None:
        if not self._stopped(worker, self._settle):
            self.deliver(worker, worker.commit())
            self._next_iteration(worker)

    def _next_iteration(self, worker: Worker) -> None:
        self.at(1, lambda: self._plan(worker))

    # ---- requests ----------------------------------------------------------------------------------

    def enter_device(self, leg: Leg, tokens: Sequence[int]) -> None:
        """Let the leg's worker know a sequence's tokens, and the oracle its right continuation."""
        draw, worker = leg.order.draw, leg.worker
        key = (worker.name, draw.id, leg.seed)
        if key not in self._references:
            weights = f"{worker.kv.config.identity.weights} {draw.adapter}"
            model = FakeModel(worker.layout, self.scenario.vocabulary, weights)
            self._references[key] = Reference(model, draw.prompt, leg.seed, Inputs(draw.items))
        request = DeviceRequest(tokens, leg.seed, self._references[key])
        worker.device.add(leg.name, request, (draw.adapter, draw.salt), draw.items)

    def deliver(self, worker: Worker, updates: list[Update]) -> None:
        """Check every token against the oracle, and pass finished requests on."""
        worker.store()
        for update in updates:
            leg = self.router.legs.get(update.sequence_id) or self.router.fork(worker, update.sequence_id)
            self._check_tokens(leg, update.tokens)
            if update.finish is None:
                continue
            if update.finish != "prefilled":
                self._check_finish(leg, update.finish)
            self.router.ended(leg, update)
        worker.forget_gone()

    def _reference(self, leg: Leg) -> Reference:
        return self._references[leg.worker.name, leg.order.draw.id, leg.seed]

    def _check_tokens(self, leg: Leg, tokens: tuple[int, ...]) -> None:
        reference, draw = self._reference(leg), leg.order.draw
        for token in tokens:
            position = len(draw.prompt) + len(leg.output)
            right = reference.token(position)
            if token != right:
                raise WrongOutput(f"{leg.name} got token {token} at position {position}; the target says {right}")
            leg.output.append(token)
            self.result.tokens += 1

    def _check_finish(self, leg: Leg, finish: str) -> None:
        draw = leg.order.draw
        if finish == "failed":
            if LoadFailure(self.scenario.load_failure) is not LoadFailure.FAIL:
                raise WrongOutput(f"{leg.name} failed, although this worker computes what does not arrive")
            return
        room = min(draw.max_tokens, self.scenario.max_model_len - len(draw.prompt))
        expected = self._reference(leg).output(room, STOP_TOKENS if draw.stops else frozenset())
        if leg.output != expected:
            raise WrongOutput(f"request {leg.name} ended after {len(leg.output)} of {len(expected)} tokens")
        self.result.finished += 1

    # ---- faults from outside -----------------------------------------------------------------------

    def _await_phases(self) -> None:
        """Strike requests whose hand-offs have come to the phase that a fault waits for."""
        for fault in list(self._awaited):
            phase, prefill, decode = self.router.phase(self.router.orders[fault.target])
            worker = prefill if fault.side == "prefill" else decode
            if phase != fault.phase or (fault.kind != "abort" and worker is None):
                continue
            self._awaited.remove(fault)
            target = fault.target if worker is None or fault.kind == "abort" else worker.name
            self.at(fault.at, lambda fault=fault, target=target: self._strike(fault.kind, target))  # type: ignore[misc]

    def _strike(self, kind: str, target: str) -> None:
        {
            "abort": self.abort,
            "death": self._kill,
            "interrupt": self._interrupt,
            "reset": self._reset_cache,
            "stop": self._stop,
        }[kind](target)

    def _count_phases(self, kind: str, worker: Worker) -> None:
        """Count which phases of hand-offs a fault of a worker falls into."""
        for order in self.router.orders.values():
            phase, prefill, decode = self.router.phase(order)
            if phase and worker in (prefill, decode):
                side = "prefill" if worker is prefill else "decode"
                self.result.faults[phase_fault(kind, phase, side)] += 1

    def abort(self, name: str) -> None:
        order = self.router.orders[name]
        phase, _prefill, _decode = self.router.phase(order)
        if order.done or order.gone:
            return
        self.result.faults["abort"] += 1
        if phase:
            self.result.faults[phase_fault("abort", phase, "")] += 1
        self.router.abort(order)

    def _reset_cache(self, name: str) -> None:
        """Empty a worker's prefix cache while its requests go on."""
        self.result.faults["cache_reset"] += 1
        self._count_phases("reset", self.workers[name])
        self.workers[name].reset_cache()

    def _stop(self, name: str) -> None:
        """Stop a worker for a while. Its memory stays where it is."""
        worker = self.workers[name]
        ticks = 3 + int(120 * chance(self.scenario.seed, "stop", name, self.now))
        self.result.faults["worker_stopped"] += 1
        self._count_phases("stop", worker)
        worker.stopped_until = max(worker.stopped_until, self.now + ticks)
        self._disturb(worker, ticks)

    def _disturb(self, worker: Worker, ticks: int = 0) -> None:
        """Note that hand-offs which involve this worker may fail."""
        self.network.trouble_worker(worker.engine)
        for other in self.workers.values():
            self.network.disturb(other.engine, worker.link.endpoint, ticks)
            self.network.disturb(worker.engine, other.link.endpoint, ticks)

    def _interrupt(self, name: str) -> None:
        """Interrupt the worker's next step: while it is planned, or before or after it has written its slots."""
        when = chance(self.scenario.seed, "interrupt", name, self.now)
        self.workers[name].interruption = ("planning", "before", "after")[int(3 * when)]

    def interrupted(self, worker: Worker) -> None:
        """Note that a worker's step is about to be given up."""
        self.result.faults["step_abandoned"] += 1
        self._count_phases("interrupt", worker)
        self._disturb(worker)

    def _end_abandoned(self, worker: Worker, ended: list[str]) -> None:
        """Fail the requests that an abandoned step ended; the others go on."""
        for name in ended:
            leg = self.router.legs.get(name)
            if leg is not None and name in leg.order.open:
                self.result.faults["request_failed"] += 1
                self.router.lost(leg)
        worker.forget_gone()

    def _kill(self, name: str) -> None:
        """Kill a worker with everything that it held, and start it again under a new id, here or elsewhere."""
        old = self.workers[name]
        self.result.faults["worker_death"] += 1
        self._count_phases("death", old)
        old.alive = False
        old.link.close()
        self._drained_steps += old.steps
        self._collect(old)
        moves = chance(self.scenario.seed, "moves", old.engine) < 0.4
        endpoint = f"{old.link.endpoint}'" if moves else old.link.endpoint
        after = int(20 * chance(self.scenario.seed, "restart", old.engine))
        self._disturb(old, after)
        self._make(name, endpoint, after=after)
        self.router.worker_died(old)
