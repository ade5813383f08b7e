"""The router in front of the workers: it sends prompts to prefill workers and carries tickets to decode workers.

    submit ─▶ leg on P ──ticket──▶ leg on D ─▶ text
                 │ lost               │ lost, failed
                 └─▶ another P        └─▶ another P, or the plain prompt to a D, or an error for the client

A leg is one sequence on one worker. Its name is new each time, as an engine makes up the keys of its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.errors import RequestError
from outrider.scheduler import State, Update
from outrider.tools.sim.device import fork_seed
from outrider.tools.sim.oracle import chance
from outrider.tools.sim.scenario import RequestDraw
from outrider.tools.sim.worker import CLUSTER_KEY, Worker
from outrider.transfer.offers import prompt_binding

if TYPE_CHECKING:
    from outrider.tools.sim.world import World

ATTEMPTS_MAX = 4
"""Number of times that the router sends a prompt, before the client gets an error."""


@dataclass(eq=False)
class Leg:
    """A sequence on one worker."""

    name: str
    worker: Worker
    order: Order
    seed: int
    hands_over: bool = False
    output: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Order:
    """A request as the router sees it."""

    draw: RequestDraw
    seed: int
    open: dict[str, Leg] = field(default_factory=dict)
    num_legs: int = 0
    num_sent: int = 0
    pending: int = 0
    """Number of things that the router is about to do for it."""
    holding: int = 0
    """How many of these carry a ticket."""
    gone: bool = False
    """Whether the client has left."""
    sealed: str | None = None
    """The latest ticket for its prompt."""

    @property
    def done(self) -> bool:
        return not self.open and not self.pending

    @property
    def binding(self) -> bytes:
        draw = self.draw
        return prompt_binding(draw.prompt, adapter=draw.adapter, salt=draw.salt, media=draw.items)


class Router:
    def __init__(self, world: World) -> None:
        self._world = world
        self._scenario = world.scenario
        self._counts = world.result.faults
        self.orders = {
            draw.id: Order(draw, seed=world.scenario.seed * 101 + number)
            for number, draw in enumerate(world.scenario.requests)
        }
        self.legs: dict[str, Leg] = {}

    # ---- sending -----------------------------------------------------------------------------------

    def start(self) -> None:
        orders = list(self.orders.values())
        if self._scenario.one_by_one:
            orders = orders[:1]
        for order in orders:
            self.later(order, 0 if self._scenario.one_by_one else order.draw.at)

    def later(self, order: Order, ticks: int) -> None:
        """Send a prompt after some ticks."""
        order.pending += 1

        def send() -> None:
            order.pending -= 1
            self._send(order)

        self._world.at(ticks, send)

    def _chance(self, what: str, order: Order) -> float:
        return chance(self._scenario.seed, what, order.draw.id, order.num_sent, order.num_legs)

    def _pick(self, names: tuple[str, ...], order: Order) -> Worker:
        return self._world.workers[names[int(len(names) * self._chance("route", order))]]

    def _send(self, order: Order) -> None:
        if order.gone:
            return
        order.num_sent += 1
        if not self._scenario.split:
            self._send_plain(order)
        elif order.num_sent >= ATTEMPTS_MAX - 1 or self._chance("plain", order) < 0.08:
            self._counts["plain_prompt"] += 1
            self._send_plain(order)
        else:
            worker = self._pick(self._scenario.prefillers, order)
            self._when_awake(order, worker, lambda: self._enter(order, worker, hands_over=True))

    def _send_plain(self, order: Order) -> None:
        worker = self._pick(self._scenario.decoders, order)
        self._when_awake(order, worker, lambda: self._enter(order, worker))

    def _when_awake(self, order: Order, worker: Worker, action: object) -> None:
        """Do something at a worker once it is not stopped; if it has died by then, send the prompt again."""
        assert callable(action)
        if not worker.stopped_for:
            action()
            return
        order.pending += 1

        def act() -> None:
            order.pending -= 1
            if worker.alive and not order.gone:
                self._when_awake(order, worker, action)
            elif not order.gone:
                self.resend(order)

        self._world.at(worker.stopped_for, act)

    def _enter(
        self, order: Order, worker: Worker, *, hands_over: bool = False, sealed: str | None = None
    ) -> Leg | None:
        """Give a prompt to a worker. Returns None if it refuses it."""
        draw, one = order.draw, hands_over
        name = draw.id if not order.num_legs else f"{draw.id}~{order.num_legs}"
        order.num_legs += 1
        ids = (name,) if one else (name, *(f"{name}#{index}" for index in range(1, draw.n)))
        try:
            ticket = None if sealed is None else CLUSTER_KEY.open(sealed)
            worker.scheduler.add(
                draw.spec(
                    id=name,
                    sequence_ids=ids,
                    hand_over=hands_over,
                    awaits_peer=ticket is not None,
                    awaits_tiers=ticket is None and draw.use_cache and worker.driver.offloading.asks,
                )
            )
        except RequestError as error:
            self._refused(order, error, sealed)
            return None
        leg = order.open[name] = self.legs[name] = Leg(name, worker, order, order.seed, hands_over)
        self._world.enter_device(leg, draw.prompt)
        if ticket is not None:
            record = self._world.network.leases.get(ticket.lease)
            if record is not None and record.fetched_at is None:
                record.fetched_at = self._world.now
            else:
                worker.excused.add(name)
            worker.tickets[name] = ticket
            worker.driver.fetch(name, ticket, binding=order.binding, takes_token=draw.n == 1)
        else:
            worker.driver.offloading.enter(name)
        self._world.wake(worker)
        return leg

    def _refused(self, order: Order, error: RequestError, sealed: str | None) -> None:
        if sealed is not None and "ticket is not from" in str(error):
            self._counts["ticket_forged"] += 1
            self.resend(order)
        elif "brings no KV" in str(error):
            self._counts["plain_prompt_refused"] += 1
        else:
            self._counts["refused"] += 1
        self._maybe_next(order)

    def resend(self, order: Order) -> None:
        """Start a request over, or give its client an error."""
        if order.gone or order.num_sent >= ATTEMPTS_MAX:
            self._counts["request_failed"] += not order.gone
            self._maybe_next(order)
            return
        self._counts["resent"] += 1
        self.later(order, 1 + int(4 * self._chance("resend", order)))

    def _maybe_next(self, order: Order) -> None:
        """With requests one by one, send the next one."""
        if self._scenario.one_by_one and order.done:
            rest = [each for each in self.orders.values() if not each.num_sent]
            if rest:
                self.later(rest[0], 1)

    # ---- what comes back ---------------------------------------------------------------------------

    def fork(self, worker: Worker, name: str) -> Leg:
        """Enter a further continuation, with which its worker has begun."""
        parent, _, index = name.partition("#")
        order = self.legs[parent].order
        leg = order.open[name] = self.legs[name] = Leg(name, worker, order, fork_seed(order.seed, int(index)))
        self._counts["fork"] += 1
        first = worker.scheduler.requests.get(name)
        self._world.enter_device(leg, order.draw.prompt if first is None else first.tokens)
        return leg

    def ended(self, leg: Leg, update: Update) -> None:
        """Follow a leg that has come to its end."""
        order = leg.order
        order.open.pop(leg.name, None)
        if update.finish == "prefilled":
            self._carry(leg, update.tokens[0])
        elif update.finish == "failed":
            self._counts["request_failed"] += 1
            self.lost(leg)
        self._maybe_next(order)

    def lost(self, leg: Leg) -> None:
        """Follow a leg that its worker has given up."""
        order = leg.order
        order.open.pop(leg.name, None)
        again = self._scenario.split and "#" not in leg.name
        if again and (leg.hands_over or self._chance("retry", order) < 0.6):
            self.resend(order)
        self._maybe_next(order)

    def worker_died(self, worker: Worker) -> None:
        """Start over whatever a dead worker was running."""
        orders = {}
        for leg in [leg for order in self.orders.values() for leg in order.open.values() if leg.worker is worker]:
            del leg.order.open[leg.name]
            orders[leg.order.draw.id] = leg.order
        for order in orders.values():
            if self._scenario.split:
                self.resend(order)
            elif not order.gone:
                # What was sent before must come out the same.
                self.later(order, 1)

    def _carry(self, leg: Leg, token: int) -> None:
        """Take a prefill worker's ticket to a decode worker, which may happen late, twice, or not as it should."""
        order, worker = leg.order, leg.worker
        sealed = worker.hand_over(leg.name, token, order.binding)
        if sealed is None:
            self._counts["handed_over_without_ticket"] += 1
        else:
            self._world.hand_offs.granted(worker, leg.name, sealed)
            order.sealed = sealed
        fault = self._chance("ticket fault", order) < self._scenario.ticket_faults
        kind = int(5 * self._chance("ticket kind", order)) if fault and sealed is not None else -1
        delay = 1 + int(4 * self._chance("hand-off", order))
        if kind == 0:
            self._counts["ticket_late"] += 1
            delay += int(90 * self._chance("ticket late", order))
        elif kind == 1:
            other = self._other_ticket(order)
            self._counts["ticket_of_another_prompt"] += other is not None
            sealed = other or sealed
        elif kind == 2 and sealed is not None:
            sealed = sealed[:-9] + ("A" if sealed[-9] != "A" else "B") + sealed[-8:]
        for copy in range(2 if kind >= 3 else 1):
            self._counts["ticket_brought_twice"] += copy
            self._take_later(order, sealed, delay + copy * int(20 * self._chance("ticket again", order)))

    def _other_ticket(self, order: Order) -> str | None:
        """Returns a ticket for another prompt of the same length, if there is one."""
        for other in self.orders.values():
            same = len(other.draw.prompt) == len(order.draw.prompt)
            if other.sealed is not None and same and other.binding != order.binding:
                return other.sealed
        return None

    def _take_later(self, order: Order, sealed: str | None, ticks: int) -> None:
        order.pending += 1
        order.holding += sealed is not None

        def take() -> None:
            order.pending -= 1
            order.holding -= sealed is not None
            if not order.gone:
                worker = self._pick(self._scenario.decoders, order)
                self._when_awake(order, worker, lambda: self._enter(order, worker, sealed=sealed))

        self._world.at(ticks, take)

    # ---- clients and phases ------------------------------------------------------------------------

    def abort(self, order: Order) -> None:
        """Let a client leave: its legs are aborted, and what is held for it is not asked for."""
        order.gone = True
        for leg in list(order.open.values()):
            del order.open[leg.name]
            if leg.worker.alive:
                leg.worker.scheduler.abort(leg.name)
                leg.worker.sanitizer.check_conservation()
                self._world.wake(leg.worker)
        self._maybe_next(order)

    def phase(self, order: Order) -> tuple[str, Worker | None, Worker | None]:
        """Returns where the hand-off of a request stands, its prefill worker and its decode worker, if it has them."""
        for leg in order.open.values():
            if leg.hands_over:
                return "queued", leg.worker, None
            ticket = leg.worker.tickets.get(leg.name)
            if ticket is not None:
                granting = next((w for w in self._world.workers.values() if w.engine == ticket.engine), None)
                return self._decode_phase(leg), granting, leg.worker
        if order.holding and order.sealed is not None:
            engine = CLUSTER_KEY.open(order.sealed).engine
            return "held", next((w for w in self._world.workers.values() if w.engine == engine), None), None
        return "", None, None

    def _decode_phase(self, leg: Leg) -> str:
        worker = leg.worker
        request = worker.scheduler.requests.get(leg.name)
        if request is None:
            return ""
        if request.state is State.FETCHING:
            return "fetching"
        if request.state is State.LOADING:
            return "reading" if worker.link.is_reading(leg.name) else "confirming"
        if request.state is State.WAITING:
            return "waiting" if request.remote is not None and request.epoch == 0 else ""
        return "decoding" if request.state is State.DECODING else ""
