"""KV on the move in the simulated world: hand-offs, pulls, a second tier, and what goes wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.kv.intervals import SlotRun
from outrider.kv.ledger import Load
from outrider.sanitizer.shadow import DURABLE
from outrider.scheduler import State
from outrider.scheduler.scheduler import Abandoned
from outrider.tools.sim.faults import TransferFate, transfer_fate
from outrider.tools.sim.oracle import chance
from outrider.tools.sim.tier import TierPage
from outrider.tools.sim.worker import LEASE_TICKS, Worker
from outrider.transfer.connector import Offer, OfferedGroup, plan_pull, signatures

if TYPE_CHECKING:
    from outrider.tools.sim.world import Ticket, World

DEADLINE_TICKS = 30


@dataclass
class Pull:
    """The transfers of one request into a worker."""

    request: str
    landing: list[int] = field(default_factory=list)
    """Ticks at which data may still land."""
    cancelled: bool = False
    """Whether its handle is destroyed, so that nothing lands any more."""


class Transfers:
    def __init__(self, world: World) -> None:
        self._world = world
        self._pulls: dict[tuple[str, str], Pull] = {}
        """The latest pull of each (engine, request)."""

    # ---- hand-off from prefill to decode -----------------------------------------------------------

    def hand_off(self, worker: Worker, ticket: Ticket) -> None:
        request = worker.scheduler.requests[ticket.draw.id]
        lease = worker.leases.grant(ticket.draw.id, self._world.now)
        names = signatures(worker.layout, worker.kv.config.identity)
        groups = {
            names[group]: OfferedGroup(
                interval, tuple(request.kv.groups[group].pages), worker.layout.groups[group].page_tokens
            )
            for group, interval in worker.kv.export_intervals(request.kv).items()
        }
        ticket.offer = Offer(
            engine=worker.engine,
            request=ticket.draw.id,
            lease=lease,
            tokens=tuple(request.tokens),
            groups=groups,
        )
        offer = ticket.offer
        self._world.at(LEASE_TICKS, lambda: self._expire_leases(worker))
        self._world.at(
            1 + int(4 * chance(self._world.scenario.seed, "hand-off", ticket.draw.id)),
            lambda: self._take_over(ticket, offer),
        )

    def _take_over(self, ticket: Ticket, offer: Offer) -> None:
        if ticket.offer is offer:
            self._world.add(self._world.workers["decode"], ticket, offer.tokens, prefilled=1)

    def _expire_leases(self, worker: Worker) -> None:
        for request in worker.leases.expire(self._world.now) if worker.alive else ():
            self._world.result.faults["lease_expired"] += 1
            worker.scheduler.release_held(request)
            worker.device.requests.pop(request, None)

    def end_lease(self, offer: Offer) -> None:
        worker = self._world.workers["prefill"]
        if worker.engine == offer.engine:
            request = worker.leases.release(offer.lease)
            if request is not None:
                worker.scheduler.release_held(request)
                worker.device.requests.pop(request, None)

    # ---- loads -------------------------------------------------------------------------------------

    def start_loads(self, worker: Worker, request: str, loads: tuple[Load, ...]) -> None:
        ticket, pull = self._world.tickets[request], Pull(request)
        self._pulls[worker.engine, request] = pull
        epoch = worker.scheduler.requests[request].epoch
        fates: list[TransferFate] = []
        for number, load in enumerate(loads):
            name = f"{worker.engine}:{epoch}:{number}"
            fate = transfer_fate(self._world.scenario, request, name, from_tier=load.key is not None)
            fates.append(fate)
            for kind in fate.kinds:
                self._world.result.faults[kind] += 1
            pull.landing.append(self._world.now + fate.delay)
            if load.key is not None:
                self._start_tier_load(worker, pull, load, fate)
            else:
                assert ticket.offer is not None
                self._start_pull(worker, pull, load, fate, ticket.offer)
        order = [fate.delay for fate in fates]
        self._world.result.faults["transfer_reordered"] += order != sorted(order)
        self._world.at(DEADLINE_TICKS, lambda: self._deadline(worker, pull, epoch))
        # Some clients abort while their KV is on its way, before or after the step that copies has run.
        patience = chance(self._world.scenario.seed, "patience", request, worker.engine)
        if patience < self._world.scenario.transfer_faults / 3:
            self._world.at(int(6 * patience / self._world.scenario.transfer_faults), lambda: self._world.abort(request))

    def _start_tier_load(self, worker: Worker, pull: Pull, load: Load, fate: TransferFate) -> None:
        self._world.at(fate.delay, lambda: self._tier_landed(worker, pull, load, fate))

    def _start_pull(self, worker: Worker, pull: Pull, load: Load, fate: TransferFate, offer: Offer) -> None:
        sequence = worker.kv.sequences[pull.request]
        table = sequence.groups[load.group].pages
        runs = plan_pull(worker.layout, worker.kv.config.identity, load, offer, table)

        def land() -> None:
            self._pull_landed(worker, pull, load, fate, offer, runs)

        self._world.at(fate.delay, land)
        if fate.duplicated:
            self._world.at(fate.delay + 3, lambda: self._arrived(worker, pull, load))

    def _pull_landed(
        self,
        worker: Worker,
        pull: Pull,
        load: Load,
        fate: TransferFate,
        offer: Offer,
        runs: tuple[SlotRun, ...],
    ) -> None:
        """Take data from the prefill worker, which must then confirm that its lease held."""
        if not worker.alive or pull.cancelled:
            return
        source = self._world.workers["prefill"]
        if fate.failed or source.engine != offer.engine:
            self._load_failed(worker, pull, load)
            return
        name = worker.layout.groups[load.group].name
        group = next(g for g, spec in enumerate(source.layout.groups) if spec.name == name)
        source_memory = source.device.memory[source.layout.arena_of[group]]
        memory = worker.device.memory[worker.layout.arena_of[load.group]]
        for run in runs:
            there, here = run.source_offset, run.destination_offset
            ids, states = source.sanitizer.steps.slots(group, run.source_page, there, run.slots)
            worker.sanitizer.steps.landed(
                pull.request, load.group, run.destination_page, here, ids, states, f"{source.engine}"
            )
            values = source_memory[run.source_page][there : there + run.slots]
            memory[run.destination_page][here : here + run.slots] = values
        if source.leases.held(offer.lease):
            self._arrived(worker, pull, load)
        else:
            self._load_failed(worker, pull, load)

    def _tier_landed(self, worker: Worker, pull: Pull, load: Load, fate: TransferFate) -> None:
        if not worker.alive or pull.cancelled:
            return
        assert load.key is not None
        found = (tier.get(load.group, load.key) for tier in worker.tiers)
        page = next((page for page in found if page is not None), None)
        sequence = worker.kv.sequences.get(pull.request)
        if sequence is None or load not in sequence.loads:
            return
        if page is None or fate.failed:
            self._world.result.faults["tier_load_failed"] += 1
            slides = worker.layout.groups[load.group].kind.slides
            draft_window = slides and load.group in worker.layout.draft_groups
            self._world.result.faults["draft_window_load_failed"] += draft_window
            self._load_failed(worker, pull, load)
            return
        size = worker.layout.groups[load.group].page_tokens
        here = sequence.groups[load.group].pages[load.interval.start // size]
        count = load.interval.size
        worker.sanitizer.steps.landed(
            pull.request, load.group, here, 0, page.ids[:count], bytes([DURABLE]) * count, "tier"
        )
        worker.device.memory[worker.layout.arena_of[load.group]][here][:count] = page.values[:count]
        self._world.result.faults["tier_load"] += 1
        self._arrived(worker, pull, load)

    def _arrived(self, worker: Worker, pull: Pull, load: Load) -> None:
        if worker.alive and not pull.cancelled:
            worker.scheduler.load_arrived(pull.request, load)
            self._after_load(worker, pull)

    def _load_failed(self, worker: Worker, pull: Pull, load: Load) -> None:
        worker.scheduler.load_failed(pull.request, load)
        self._after_load(worker, pull)

    def _after_load(self, worker: Worker, pull: Pull) -> None:
        request = worker.scheduler.requests.get(pull.request)
        ticket = self._world.tickets[pull.request]
        if ticket.offer is not None and (request is None or request.state is not State.LOADING):
            self.end_lease(ticket.offer)
        self._world.deliver(worker, worker.scheduler.take_updates())
        self._world.wake(worker)

    def _deadline(self, worker: Worker, pull: Pull, epoch: int) -> None:
        """Give up a transfer that has not ended by now; its pages wait until its handle is destroyed."""
        request = worker.scheduler.requests.get(pull.request) if worker.alive else None
        if request is None or request.state is not State.LOADING or request.epoch != epoch:
            return
        self._world.result.faults["transfer_lost"] += 1
        self.quarantine(worker, pull, worker.scheduler.load_lost(pull.request))
        self._after_load(worker, pull)

    def quarantine_aborted(self, worker: Worker, request: str, aside: list[tuple[int, list[int]]]) -> None:
        """Cancel the transfer of an aborted request, or wait until it cannot land any more, as transports differ."""
        pull = self._pulls.pop((worker.engine, request), None)
        if pull is None or not aside:
            return
        if chance(self._world.scenario.seed, "cancel", request, worker.engine) < 0.5:
            self._world.result.faults["transfer_cancelled"] += 1
            pull.cancelled = True
            worker.kv.restore_quarantined(aside)
        else:
            self.quarantine(worker, pull, aside)

    def quarantine_abandoned(self, worker: Worker, abandoned: Abandoned) -> None:
        """Keep the pages of loads that an abandoned step ended aside until none of these loads can land any more."""
        pulls = [self._pulls.pop((worker.engine, request), None) for request in abandoned.ended]
        landing = [tick for pull in pulls if pull is not None for tick in pull.landing]
        self.quarantine(worker, Pull("-", landing), abandoned.quarantined)

    def quarantine(self, worker: Worker, pull: Pull, aside: list[tuple[int, list[int]]]) -> None:
        def destroy() -> None:
            if worker.alive:
                worker.kv.restore_quarantined(aside)
                self._world.wake(worker)

        if aside:
            self._world.at(max([0, *(tick - self._world.now for tick in pull.landing)]) + 1, destroy)

    def offload(self, worker: Worker) -> None:
        """Let further tiers take over some of the pages that were published."""
        pages, worker.sanitizer.new_pages = worker.sanitizer.new_pages, []
        for tier in worker.tiers:
            for new in pages:
                arena = worker.kv.pool.arenas[worker.layout.arena_of[new.group]]
                taken = chance(self._world.scenario.seed, "tier", tier.name, new.key) < tier.probability
                if not taken or not arena.published[new.page]:
                    continue
                wanted = tier.wants(new.group, new.page_number, new.marks)
                worker.sanitizer.check_tier(tier, new, wanted=wanted)
                if wanted:
                    size = worker.layout.groups[new.group].page_tokens
                    ids, _states = worker.sanitizer.steps.slots(new.group, new.page, 0, size)
                    values = worker.device.memory[arena.index][new.page][:size]
                    tier.put(new.group, new.key, TierPage(list(values), ids))
                    self._world.result.faults[f"{tier.name}_tier_page"] += 1
