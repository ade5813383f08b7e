"""The world of one scenario: workers, a router, transfers and faults on a virtual clock.

Everything that happens is an event at a tick; events at one tick happen in the order they were made. All
chance comes from the scenario's seed and the names of things, never from an order of draws, so that
leaving one request out moves nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush

from outrider.errors import InvariantViolation, RequestError, TransferError
from outrider.kv.retention import Retention
from outrider.scheduler import Role, State, StepPlan, Update, Verdict
from outrider.scheduler.scheduler import Abandoned
from outrider.tools.sim.device import DeviceRequest, fork_seed
from outrider.tools.sim.oracle import FakeModel, Inputs, Reference, chance
from outrider.tools.sim.scenario import STOP_TOKENS, RequestDraw, Scenario
from outrider.tools.sim.tier import REMOTE, FakeTier
from outrider.tools.sim.transfers import Transfers
from outrider.tools.sim.worker import Worker
from outrider.transfer.connector import Offer, offered_intervals

MAX_STEPS = 6_000


class WrongOutput(Exception):
    """I7: a request got a token that the target alone would not have written."""


class Stuck(Exception):
    """Requests are left, and nothing happens any more."""


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


@dataclass
class Ticket:
    """A request as the router sees it."""

    draw: RequestDraw
    seed: int
    output: list[int] = field(default_factory=list)
    done: bool = False
    offer: Offer | None = None


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0
        self.result = Result()
        self.tickets: dict[str, Ticket] = {}
        self._forks: dict[str, tuple[Ticket, int]] = {}
        """By id of a fork: the ticket of its request, and which continuation it is."""
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_count = 0
        self._hash = blake2b(digest_size=16)
        self._incarnations: Counter[str] = Counter()
        self._references: dict[tuple[str, str, int], Reference] = {}
        self._ticking: set[str] = set()
        self._listeners: list[Callable[[StepPlan, Verdict], None]] = []
        self._drained_steps = 0
        self._transfers = Transfers(self)
        self.tier = self._remote_tier() if scenario.tier_probability > 0 else None
        self.workers = {"decode": self._make("decode")}
        if scenario.split:
            self.workers["prefill"] = self._make("prefill")

    # ---- set-up ------------------------------------------------------------------------------------

    def _make(self, name: str) -> Worker:
        self._incarnations[name] += 1
        split = self.scenario.split
        role = Role.BOTH if not split else Role.PREFILL if name == "prefill" else Role.DECODE
        return Worker(
            name=name,
            engine=f"{name}.{self._incarnations[name]}",
            scenario=self.scenario,
            layout=self.scenario.layout(peer=name == "prefill"),
            role=role,
            on_stale_draft=self._stale_draft,
            on_plan=self._record,
            remote_tier=self.tier,
        )

    def _remote_tier(self) -> FakeTier:
        scenario = self.scenario
        roomy = chance(scenario.seed, "tier") < 0.5
        return FakeTier(
            REMOTE,
            scenario.layout(),
            Retention.of(scenario.tier_retention),
            probability=scenario.tier_probability,
            capacity_pages=400 if roomy else 24,
        )

    def watch(self, listener: Callable[[StepPlan, Verdict], None]) -> None:
        """Call the listener for every step that has run."""
        self._listeners.append(listener)

    def _record(self, plan: StepPlan, verdict: Verdict) -> None:
        for listener in self._listeners:
            listener(plan, verdict)
        self._hash.update(repr((plan.step, plan.scheduled, verdict.tokens, verdict.proposed)).encode())
        self.result.faults["chunking"] += sum(row.num_rows > 1 and not row.samples for row in plan.scheduled)
        self.result.faults["drafter_catching_up"] += sum(row.feed_to is not None for row in plan.scheduled)
        self.result.faults["page_copy"] += len(plan.kv.copies)
        for row, tokens in zip(plan.scheduled, verdict.tokens, strict=True):
            if row.drafts:
                self.result.drafts += row.drafts
                self.result.accepted += len(tokens) - 1

    def _stale_draft(self, request: str, position: int) -> None:
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
            self._fail("stuck", None, str(stuck))
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
        result, scheduler = self.result, worker.scheduler
        result.faults["preemption"] += scheduler.num_preemptions
        result.faults["page_shortage"] += scheduler.num_stalls
        result.faults["preemption_while_loading"] += worker.preemptions_while_loading
        result.faults["draft_groups_dropped"] += worker.kv.dropped_drafts
        result.faults["media_hit"] += worker.sanitizer.media_hits
        result.faults["adapter_hit"] += worker.sanitizer.adapter_hits
        result.faults["end_kept"] += worker.sanitizer.ends_kept
        result.faults["shared_prefix_marked"] += worker.sanitizer.shared_prefixes_marked
        result.hit_mismatches += worker.sanitizer.hit_mismatches
        result.hits += worker.sanitizer.hits

    def _fail(self, kind: str, invariant: str | None, message: str) -> None:
        if self.result.failure is None:
            self.result.failure = Failure(kind, invariant, message, self._total_steps())

    def _start(self) -> None:
        for number, draw in enumerate(self.scenario.requests):
            ticket = Ticket(draw, seed=self.scenario.seed * 101 + number)
            self.tickets[draw.id] = ticket
            self._forks.update({id: (ticket, index) for index, id in enumerate(draw.fork_ids, start=1)})
            if not self.scenario.one_by_one:
                self.at(draw.at, lambda ticket=ticket: self._submit(ticket))  # type: ignore[misc]
        if self.scenario.one_by_one and self.tickets:
            self._submit(next(iter(self.tickets.values())))
        for fault in self.scenario.faults:
            action = {
                "abort": self.abort,
                "death": self._kill,
                "interrupt": self._interrupt,
                "reset": self._reset_cache,
            }[fault.kind]
            self.at(fault.at, lambda action=action, target=fault.target: action(target))  # type: ignore[misc]

    def _loop(self) -> None:
        while self._events:
            tick, _order, action = heappop(self._events)
            self.now = max(self.now, tick)
            action()
            if self._total_steps() > MAX_STEPS:
                waiting = [name for name, ticket in self.tickets.items() if not ticket.done]
                raise Stuck(f"after {MAX_STEPS} steps these requests are not done: {', '.join(waiting)}")

    def _check_end(self) -> None:
        waiting = [name for name, ticket in self.tickets.items() if not ticket.done]
        if waiting:
            raise Stuck(f"nothing is left to happen, but these requests are not done: {', '.join(waiting)}")
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

    def _plan(self, worker: Worker) -> None:
        if not worker.alive:
            return
        if not worker.scheduler.has_work or worker.scheduler.only_loading:
            if worker.flying:
                self._settle(worker)
            else:
                self._ticking.discard(worker.engine)
            return
        worker.plan()
        for request, loads in worker.scheduler.take_loads():
            self._transfers.start_loads(worker, request, loads)
        self.at(1, lambda: self._advance(worker))

    def _advance(self, worker: Worker) -> None:
        if not worker.alive:
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
        if worker.alive:
            self.deliver(worker, worker.commit())
            self._next_iteration(worker)

    def _next_iteration(self, worker: Worker) -> None:
        self.at(1, lambda: self._plan(worker))

    # ---- requests ----------------------------------------------------------------------------------

    def _submit(self, ticket: Ticket) -> None:
        """Send a request to the worker that prefills it."""
        worker = self.workers.get("prefill", self.workers["decode"])
        if ticket.offer is not None:
            self._transfers.end_lease(ticket.offer)
            ticket.offer = None
        self.add(worker, ticket, tuple(ticket.draw.prompt), prefilled=0)

    def add(self, worker: Worker, ticket: Ticket, tokens: tuple[int, ...], *, prefilled: int) -> None:
        draw = ticket.draw
        if ticket.done or draw.id in worker.scheduler.requests:
            return
        remote = None
        if prefilled and ticket.offer is not None:
            try:
                remote = offered_intervals(worker.layout, worker.kv.config.identity, ticket.offer)
            except TransferError:
                self.result.faults["peer_refused"] += 1
                self._transfers.end_lease(ticket.offer)
                self._done(ticket)
                return
            missing = len(worker.layout.groups) - len(remote)
            self.result.faults["peer_without_drafter"] += missing > 0
        try:
            ids = (draw.id,) if self.scenario.split else (draw.id, *draw.fork_ids)
            worker.scheduler.add(draw.spec(prompt=tokens, sequence_ids=ids, remote=remote, prefilled_tokens=prefilled))
        except RequestError:
            self.result.faults["refused"] += 1
            self._done(ticket)
            return
        self._enter_device(worker, draw.id, ticket, tokens, ticket.seed)
        self.wake(worker)

    def _enter_device(self, worker: Worker, name: str, ticket: Ticket, tokens: tuple[int, ...], seed: int) -> None:
        draw = ticket.draw
        key = (worker.name, draw.id, seed)
        if key not in self._references:
            weights = f"{worker.kv.config.identity.weights} {draw.adapter}"
            model = FakeModel(worker.layout, self.scenario.vocabulary, weights)
            self._references[key] = Reference(model, draw.prompt, seed, Inputs(draw.items))
        request = DeviceRequest(tokens, seed, self._references[key])
        worker.device.add(name, request, (draw.adapter, draw.salt), draw.items)

    def deliver(self, worker: Worker, updates: list[Update]) -> None:
        """Check every token against the oracle, and pass finished requests on."""
        self._transfers.offload(worker)
        for update in updates:
            name = update.sequence_id
            ticket = self.tickets.get(name) or self._fork_ticket(worker, name)
            self._check_tokens(worker, ticket, name, update.tokens)
            if update.finish is None:
                continue
            worker.sanitizer.forget(name)
            if update.finish == "prefilled":
                self._transfers.hand_off(worker, ticket)
            else:
                self._check_finish(worker, ticket, update.finish)
                worker.device.requests.pop(name, None)
                self._done(ticket)

    def _fork_ticket(self, worker: Worker, name: str) -> Ticket:
        parent, index = self._forks[name]
        ticket = Ticket(parent.draw, seed=fork_seed(parent.seed, index))
        self.tickets[name] = ticket
        self.result.faults["fork"] += 1
        first = worker.scheduler.requests.get(name)
        tokens = tuple(first.tokens) if first is not None else tuple(parent.draw.prompt)
        self._enter_device(worker, name, ticket, tokens, ticket.seed)
        return ticket

    def _check_tokens(self, worker: Worker, ticket: Ticket, name: str, tokens: tuple[int, ...]) -> None:
        reference = self._references[worker.name, ticket.draw.id, ticket.seed]
        for token in tokens:
            position = len(ticket.draw.prompt) + len(ticket.output)
            right = reference.token(position)
            if token != right:
                raise WrongOutput(f"request {name} got token {token} at position {position}; the target says {right}")
            ticket.output.append(token)
            self.result.tokens += 1

    def _check_finish(self, worker: Worker, ticket: Ticket, finish: str) -> None:
        if finish == "failed":
            self.result.faults["request_failed"] += 1
            return
        room = min(ticket.draw.max_tokens, self.scenario.max_model_len - len(ticket.draw.prompt))
        reference = self._references[worker.name, ticket.draw.id, ticket.seed]
        expected = reference.output(room, STOP_TOKENS if ticket.draw.stops else frozenset())
        if ticket.output != expected:
            raise WrongOutput(f"request {ticket.draw.id} ended after {len(ticket.output)} of {len(expected)} tokens")
        self.result.finished += 1

    def _done(self, ticket: Ticket) -> None:
        ticket.done = True
        if self.scenario.one_by_one:
            nxt = next((t for t in self.tickets.values() if not t.done), None)
            if nxt is not None:
                self.at(1, lambda: self._submit(nxt))

    # ---- faults from outside -----------------------------------------------------------------------

    def abort(self, name: str) -> None:
        for worker in self.workers.values():
            request = worker.scheduler.requests.get(name)
            if request is None:
                continue
            self.result.faults["abort"] += 1
            held = request.state is State.HELD
            self._transfers.quarantine_aborted(worker, name, worker.scheduler.abort(name))
            worker.sanitizer.check_conservation()
            self.tickets[name].done = True
            if held:
                offer = self.tickets[name].offer
                assert offer is not None
                worker.leases.release(offer.lease)
            self.wake(worker)

    def _reset_cache(self, name: str) -> None:
        """Empty a worker's prefix cache while its requests go on."""
        self.result.faults["cache_reset"] += 1
        self.workers[name].kv.reset_cache()

    def _interrupt(self, name: str) -> None:
        """Interrupt the worker's next step, before or after it has written its slots."""
        ran = chance(self.scenario.seed, "interrupt", name, self.now) < 0.5
        self.workers[name].interruption = "after" if ran else "before"

    def _end_abandoned(self, worker: Worker, abandoned: Abandoned) -> None:
        """Fail the requests that an abandoned step ended; the others go on."""
        self.result.faults["step_abandoned"] += 1
        self.result.faults["request_failed"] += len(abandoned.ended)
        self._transfers.quarantine_abandoned(worker, abandoned)
        for name in abandoned.ended:
            worker.sanitizer.forget(name)
            worker.device.requests.pop(name, None)
            ticket = self.tickets.get(name)
            if ticket is None:
                continue
            if ticket.offer is not None:
                self._transfers.end_lease(ticket.offer)
            self._done(ticket)

    def _kill(self, name: str) -> None:
        """Kill a worker with everything that it held, and start it again under a new id."""
        old = self.workers[name]
        self.result.faults["worker_death"] += 1
        old.alive = False
        self._drained_steps += old.steps
        self._collect(old)
        new = self.workers[name] = self._make(name)
        lost = [n for n, request in old.scheduler.requests.items() if request.state is not State.HELD]
        for request_name in lost:
            ticket = self.tickets.get(request_name)
            if ticket is None or ticket.done:
                continue
            if request_name in self._forks:
                del self.tickets[request_name]
                continue
            # The router starts it over, forks and all; what was sent before must come out the same.
            for fork in ticket.draw.fork_ids:
                self.tickets.pop(fork, None)
            ticket.output.clear()
            self.at(1, lambda ticket=ticket: self._submit(ticket))  # type: ignore[misc]
        assert new.alive
