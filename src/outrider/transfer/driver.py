"""The state machine of hand-offs: the engine and the simulation run this very code. Torch-free.

On the prefill worker (P), `hand_over` grants a lease for a prompt that was computed and returns a sealed ticket. The
`Desk` answers the decode worker meanwhile; `advance` gives pages back when a lease has ended.

On the decode worker (D), a hand-off runs through these phases:

    fetch ─▶ ASKING ──Offered──▶ QUEUED ──loads──▶ READING ──all ended──▶ CONFIRMING ──Confirmed──▶ settled
                │                   │                 │                       │
                └── no answer ──────┴── aborted ──────┴── too late, failed ───┴──▶ computed here, or failed

Nothing that was read is used before P has confirmed that its lease held from the offer until after the last byte. Pages
of a read that was given up stay in quarantine until the link says that the read has ended.

    engine step:   advance ─▶ schedule ─▶ start_loads ─▶ run ─▶ commit ─▶ hand_over
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.errors import TransferError
from outrider.kv.ledger import Load
from outrider.scheduler import Scheduler, State
from outrider.transfer.lending import Lender
from outrider.transfer.link import Failed, GroupRead, Landed, Link, Quiet, Received
from outrider.transfer.messages import (
    PROTOCOL,
    Confirm,
    Confirmed,
    Fetch,
    Hello,
    Message,
    Offered,
    Refused,
    Release,
    Renew,
    Welcome,
)
from outrider.transfer.offers import (
    GroupSignature,
    from_wire,
    layout_digest,
    offered_intervals,
    plan_pull,
    shared_groups,
    signatures,
)
from outrider.transfer.records import (
    RENEW_S_MIN,
    RENEWALS_PER_LEASE,
    Aside,
    Fetched,
    FirstToken,
    HandOff,
    Peer,
    Phase,
    Settled,
    Tiers,
    TransferChecks,
)
from outrider.transfer.tickets import Ticket


class TransferDriver:
    def __init__(
        self,
        scheduler: Scheduler,
        link: Link,
        lender: Lender,
        *,
        clock: Callable[[], float],
        time_of_day: Callable[[], float],
        tiers: Tiers | None = None,
        checks: TransferChecks | None = None,
    ) -> None:
        """`lender`: the same worker's own promises, which its link answers for."""
        self.engine = lender.engine
        self.limits = lender.limits
        self.counters = lender.counters
        self.lender = lender
        self.checks = checks
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._layout = scheduler.kv.layout
        self._identity = scheduler.kv.config.identity
        self._signatures = signatures(self._layout, self._identity)
        self._link = link
        self._tiers = tiers
        self._clock = clock
        self._time_of_day = time_of_day
        self._hand_offs: dict[str, HandOff] = {}
        self._by_lease: dict[bytes, HandOff] = {}
        self._peers: dict[str, Peer] = {}
        self._reads: dict[int, HandOff] = {}
        """Reads from peers that have not ended, by number; those of hand-offs that were given up too."""
        self._tier_loads: dict[int, tuple[str, Load]] = {}
        self._tier_limits_s: dict[str, float] = {}
        """When the loads from tiers of a sequence are given up."""
        self._aside: list[Aside] = []
        self._fetched: list[Fetched] = []
        self._settled: list[Settled] = []
        self._renew_at_s = 0.0

    def hand_over(self, sequence: str, *, binding: bytes, first: FirstToken) -> str | None:
        """Promise a held sequence's KV to a decode worker: see `Lender.hand_over`."""
        return self.lender.hand_over(sequence, endpoint=self._link.endpoint, binding=binding, first=first)

    # ---- asking ------------------------------------------------------------------------------------

    def fetch(self, sequence: str, ticket: Ticket, *, binding: bytes, takes_token: bool = True) -> None:
        """Ask for the KV that a ticket promises to a request, which the scheduler has as FETCHING.

        `binding` is that of the request's own prompt and tenant. Without `takes_token` the request samples its first
        token itself.
        """
        self._settle_given_up()
        now_s = self._clock()
        self.counters.fetches += 1
        hand_off = HandOff(sequence, ticket, takes_token, Phase.ASKING, now_s)
        self._hand_offs[sequence] = hand_off
        reason = self._refuse_ticket(ticket, binding)
        if reason:
            self._not_fetched(hand_off, reason)
            return
        self._by_lease[ticket.lease] = hand_off
        hand_off.deadline_s = now_s + self.limits.answer_s
        peer = self._peers.get(ticket.endpoint)
        if peer is None:
            self._peers[ticket.endpoint] = peer = Peer(ticket.endpoint, now_s + self.limits.answer_s)
            self._say_hello(peer)
        elif peer.engine is not None and not peer.fencing:
            self._ask(hand_off, peer)

    def decline(self, ticket: Ticket, *, binding: bytes) -> None:
        """Let the prefill worker of a ticket know that its KV is not needed, unless another request reads it or the
        ticket is for another prompt: a ticket that is repeated takes nothing away from its owner."""
        if ticket.binding != binding or ticket.lease in self._by_lease:
            return
        self._link.send(ticket.endpoint, Release(lease=ticket.lease, reader=self.engine))

    def _refuse_ticket(self, ticket: Ticket, binding: bytes) -> str:
        """Returns why a ticket, which is of this cluster, is of no use; nothing if it is of use."""
        if ticket.version != PROTOCOL:
            return "the ticket is of another version of the protocol"
        if ticket.binding != binding:
            return "the ticket is for another prompt, or for another tenant's"
        if self._time_of_day() >= ticket.expires_s:
            return "the ticket has expired"
        if ticket.lease in self._by_lease:
            return "the ticket is in use by another request"
        return ""

    def _say_hello(self, peer: Peer) -> None:
        self._link.send(peer.endpoint, Hello(digest=layout_digest(self._layout, self._identity), reader=self.engine))

    def _ask(self, hand_off: HandOff, peer: Peer) -> None:
        if peer.engine == hand_off.ticket.engine:
            self._link.send(peer.endpoint, Fetch(lease=hand_off.ticket.lease, reader=self.engine))
        else:
            # Either the ticket is of a worker that is gone, or the worker that is known is.
            self._say_hello(peer)

    def _of_peer(self, peer: str, *phases: Phase) -> list[HandOff]:
        return [each for each in self._hand_offs.values() if each.peer == peer and each.phase in phases]

    def _met(self, peer: Peer, message: Welcome) -> None:
        if peer.fencing:
            return
        if peer.engine is not None:
            if message.engine != peer.engine:
                self._cut_off(peer)  # it was restarted
                return
            for hand_off in self._of_peer(peer.endpoint, Phase.ASKING):
                if hand_off.ticket.engine != peer.engine:
                    self._not_fetched(hand_off, "the prefill worker was restarted since it handed the prompt over")
            return
        try:
            theirs = tuple(GroupSignature.of(signature) for signature in message.signatures)
            shared = shared_groups(self._layout, self._identity, theirs)
            if not message.lease_s > 0.0:
                raise TransferError(f"the prefill worker says that its leases last {message.lease_s} s")
            self._link.meet(peer.endpoint, message.introduction)
        except TransferError as error:
            self._refused_by(peer, str(error))
            return
        peer.engine, peer.signatures = message.engine, theirs
        peer.renew_s = max(RENEW_S_MIN, min(self.limits.renew_s, message.lease_s / RENEWALS_PER_LEASE))
        waiting = self._of_peer(peer.endpoint, Phase.ASKING)
        if len(shared) < len(self._layout.groups):
            self.counters.draft_groups_missing += len(waiting)
        for hand_off in waiting:
            if hand_off.ticket.engine == peer.engine:
                self._ask(hand_off, peer)
            else:
                self._not_fetched(hand_off, "the prefill worker was restarted since it handed the prompt over")

    def _refused_by(self, peer: Peer, reason: str) -> None:
        """No KV of this peer is of use here; the next ticket is tried anew."""
        del self._peers[peer.endpoint]
        self._link.forget(peer.endpoint)
        for hand_off in self._of_peer(peer.endpoint, Phase.ASKING):
            self._not_fetched(hand_off, reason)

    def _offered(self, hand_off: HandOff, message: Offered) -> None:
        peer = self._peers.get(hand_off.peer)
        if hand_off.phase is not Phase.ASKING or peer is None or peer.engine is None:
            return
        try:
            offer = from_wire(message, peer.signatures)
            if offer.engine != hand_off.ticket.engine or offer.binding != hand_off.ticket.binding:
                raise TransferError(f"{offer} is for another prompt than its ticket")
            request = self._scheduler.requests.get(hand_off.sequence)
            if request is not None and offer.num_tokens != request.prompt_len:
                raise TransferError(f"{offer} is for a prompt of another length")
            remote = offered_intervals(self._layout, self._identity, offer)
        except TransferError as error:
            self._not_fetched(hand_off, str(error))
            return
        hand_off.offer = offer
        self._enter(hand_off, Phase.QUEUED)
        self._renew_at_s = min(self._renew_at_s, hand_off.since_s + peer.renew_s)
        self._fetched.append(Fetched(hand_off.sequence, offer))
        if hand_off.takes_token:
            self._scheduler.fetched(hand_off.sequence, remote, offer.first_token, drafts=len(offer.drafts))
        else:
            self._scheduler.fetched(hand_off.sequence, remote, None)

    def _not_fetched(self, hand_off: HandOff, reason: str) -> None:
        self.counters.fetch_failures += 1
        self._forget(hand_off)
        self._fetched.append(Fetched(hand_off.sequence, None, reason))
        self._scheduler.not_fetched(hand_off.sequence)

    def _enter(self, hand_off: HandOff, phase: Phase, limit_s: float = 0.0) -> None:
        hand_off.phase, hand_off.since_s, hand_off.asked_again = phase, self._clock(), False
        hand_off.deadline_s = hand_off.since_s + limit_s if limit_s else 0.0

    # ---- reading and confirming --------------------------------------------------------------------

    def start_loads(self) -> None:
        """Start what the last `schedule` admitted, before its step runs."""
        self._settle_given_up()
        for sequence, loads in self._scheduler.take_loads():
            request = self._scheduler.requests.get(sequence)
            if request is None:
                continue
            hand_off = self._hand_offs.get(sequence)
            for load in loads:
                if load.key is not None:
                    self._load_from_tier(sequence, load)
            pulls = [load for load in loads if load.key is None]
            if hand_off is not None and pulls:
                self._start_reading(hand_off, pulls)
            else:
                for load in pulls:
                    self._scheduler.load_failed(sequence, load)
        self._release_unneeded()

    def _release_unneeded(self) -> None:
        """End hand-offs of requests that run without them: the local cache held everything, or the first token was the
        last one."""
        for hand_off in [each for each in self._hand_offs.values() if each.phase is Phase.QUEUED]:
            request = self._scheduler.requests.get(hand_off.sequence)
            if request is None or request.state is not State.WAITING:
                self._release(hand_off)
                if request is not None:
                    hand_off.cached_tokens, hand_off.queued_s = request.kv.hit, self._clock() - hand_off.since_s
                    self._report(hand_off)

    def _start_reading(self, hand_off: HandOff, loads: Sequence[Load]) -> None:
        peer, offer = self._peers.get(hand_off.peer), hand_off.offer
        kv = self._scheduler.requests[hand_off.sequence].kv
        hand_off.cached_tokens, hand_off.wanted_tokens = kv.hit, kv.load_end - kv.hit
        self.counters.queried_tokens += hand_off.wanted_tokens
        hand_off.queued_s = self._clock() - hand_off.since_s
        self._enter(hand_off, Phase.READING, self.limits.read_s)
        assert offer is not None
        for load in loads:
            try:
                if peer is None or peer.engine != offer.engine or peer.fencing:
                    raise TransferError("the connection to the prefill worker was lost")
                runs = plan_pull(self._layout, self._identity, load, offer, kv.groups[load.group].pages)
                remote_group = peer.signatures.index(self._signatures[load.group])
                number = self._link.read(hand_off.peer, GroupRead(load.group, remote_group, runs))
            except TransferError as error:
                hand_off.failed.append(load)
                hand_off.reason = str(error)
                continue
            hand_off.pulls[load] = runs
            hand_off.open[number] = load
            self._reads[number] = hand_off
        self._maybe_confirm(hand_off)

    def _read_ended(self, number: int, reason: str | None) -> None:
        hand_off = self._reads.pop(number, None)
        if hand_off is None:
            return
        for aside in self._aside:
            aside.peer_reads.discard(number)
        load = hand_off.open.pop(number)
        if reason is None:
            hand_off.landed.append(load)
        else:
            hand_off.failed.append(load)
            hand_off.reason = reason
        if self._hand_offs.get(hand_off.sequence) is hand_off:
            self._maybe_confirm(hand_off)
        elif not hand_off.open:
            self._tell_released(hand_off)

    def _maybe_confirm(self, hand_off: HandOff) -> None:
        if hand_off.open:
            return
        hand_off.read_s = self._clock() - hand_off.since_s
        if not hand_off.landed:
            self._settle(hand_off, held=False)
            return
        self._enter(hand_off, Phase.CONFIRMING, self.limits.answer_s)
        self._send_confirm(hand_off)

    def _send_confirm(self, hand_off: HandOff) -> None:
        digests_of: list[tuple[int, int, int]] = []
        peer = self._peers.get(hand_off.peer)
        if self.checks is not None and self.checks.compares_bytes and peer is not None:
            digests_of = [
                (peer.signatures.index(self._signatures[load.group]), load.interval.start, load.interval.end)
                for load in hand_off.landed
            ]
        message = Confirm(lease=hand_off.ticket.lease, reader=self.engine, digests_of=digests_of)
        self._link.send(hand_off.peer, message)

    def _confirmed(self, hand_off: HandOff, message: Confirmed) -> None:
        if hand_off.phase is not Phase.CONFIRMING:
            return
        if not message.held:
            hand_off.reason = "the prefill worker's lease ended before everything had been read"
        elif message.digests:
            self._compare(hand_off, message.digests)
        self._settle(hand_off, held=message.held)

    def _compare(self, hand_off: HandOff, digests: Sequence[bytes]) -> None:
        """Take back what did not arrive as it was sent."""
        assert self.checks is not None and hand_off.offer is not None
        good = []
        for place, load in enumerate(hand_off.landed):
            if place < len(digests) and digests[place] == self.checks.digest(hand_off.sequence, load):
                good.append(load)
            else:
                hand_off.failed.append(load)
                hand_off.reason = "bytes that arrived are not those that the prefill worker holds"
                self.checks.differs(hand_off.sequence, load, hand_off.offer.engine)
        hand_off.landed = good

    def _settle(self, hand_off: HandOff, *, held: bool) -> None:
        """Import what has arrived and was confirmed; report the rest as failed."""
        if not held:
            hand_off.failed += hand_off.landed
            hand_off.landed = []
        self._release(hand_off)
        self._report(hand_off)
        assert hand_off.offer is not None
        for load in hand_off.landed:
            if self.checks is not None:
                self.checks.arrived(hand_off.sequence, load, hand_off.pulls[load], hand_off.offer.engine)
            self._scheduler.load_arrived(hand_off.sequence, load)
        for load in hand_off.failed:
            self._scheduler.load_failed(hand_off.sequence, load)

    def _report(self, hand_off: HandOff) -> None:
        complete = not hand_off.failed and not hand_off.reason
        tokens = hand_off.wanted_tokens if complete else 0
        moved = sum(self._load_bytes(load) for load in hand_off.landed)
        self.counters.fetch_failures += not complete
        self.counters.transferred_tokens += tokens
        self.counters.transferred_bytes += moved
        confirmed_s = self._clock() - hand_off.since_s if hand_off.phase is Phase.CONFIRMING else 0.0
        self._settled.append(
            Settled(
                hand_off.sequence,
                hand_off.cached_tokens,
                tokens,
                moved,
                hand_off.queued_s,
                hand_off.read_s,
                confirmed_s,
                hand_off.reason,
            )
        )

    def _load_bytes(self, load: Load) -> int:
        return load.interval.size * self._layout.groups[load.group].slot_bytes

    def take_settled(self) -> list[Settled]:
        """Returns the hand-offs that have ended since the last call."""
        settled, self._settled = self._settled, []
        return settled

    # ---- tiers -------------------------------------------------------------------------------------

    def _load_from_tier(self, sequence: str, load: Load) -> None:
        assert self._tiers is not None, "a load from a tier that this worker does not have"
        size = self._layout.groups[load.group].page_tokens
        page = self._scheduler.requests[sequence].kv.groups[load.group].pages[load.interval.start // size]
        number = self._tiers.load(load, page, sequence)
        self._tier_loads[number] = (sequence, load)
        self._tier_limits_s[sequence] = self._clock() + self.limits.read_s

    def _tier_load_ended(self, event: Landed | Failed) -> None:
        sequence, load = self._tier_loads.pop(event.transfer, (None, None))
        for aside in self._aside:
            aside.tier_loads.discard(event.transfer)
        if sequence is None or load is None:
            return
        if sequence not in {name for name, _load in self._tier_loads.values()}:
            self._tier_limits_s.pop(sequence, None)
        if isinstance(event, Landed):
            self._scheduler.load_arrived(sequence, load)
        else:
            self._scheduler.load_failed(sequence, load)

    # ---- letting go --------------------------------------------------------------------------------

    def _forget(self, hand_off: HandOff) -> None:
        """Drop the record of a hand-off; reads that are still open are followed until they end."""
        if self._hand_offs.get(hand_off.sequence) is hand_off:
            del self._hand_offs[hand_off.sequence]
        if self._by_lease.get(hand_off.ticket.lease) is hand_off:
            del self._by_lease[hand_off.ticket.lease]

    def _release(self, hand_off: HandOff) -> None:
        """End a hand-off: P may give its pages back, now or once the reads that are still open have ended."""
        self._forget(hand_off)
        if not hand_off.open:
            self._tell_released(hand_off)

    def _tell_released(self, hand_off: HandOff) -> None:
        self._link.send(hand_off.peer, Release(lease=hand_off.ticket.lease, reader=self.engine))

    def _settle_given_up(self) -> None:
        """Follow requests that the scheduler gave up: aborted, failed, or lost with an interrupted step."""
        for sequence, pages in self._scheduler.take_given_up():
            # Before the next step writes to the pages.
            self.lender.withdraw(sequence)
            hand_off = self._hand_offs.get(sequence)
            reads = {number for number, each in self._reads.items() if each.sequence == sequence}
            loads = {number for number, (name, _load) in self._tier_loads.items() if name == sequence}
            if pages:
                self._aside.append(Aside(pages, reads, loads))
            request = self._scheduler.requests.get(sequence)
            if hand_off is not None and (request is None or request.state is not State.LOADING):
                self._release(hand_off)
        self._restore()

    def _restore(self) -> None:
        """Give back pages that nothing can write to any more."""
        for aside in [aside for aside in self._aside if not aside.peer_reads and not aside.tier_loads]:
            self._aside.remove(aside)
            self._kv.restore_quarantined(aside.pages)

    # ---- time --------------------------------------------------------------------------------------

    def advance(self) -> list[Fetched]:
        """Take in what has happened, and end what has taken too long. Returns the answers of prefill workers."""
        now_s = self._clock()
        self._settle_given_up()
        for event in self._link.poll():
            match event:
                case Received(peer=peer, message=message):
                    self._received(peer, message)
                case Landed(transfer=number):
                    self._read_ended(number, None)
                case Failed(transfer=number, reason=reason):
                    self._read_ended(number, reason)
                case Quiet(peer=name):
                    self._quiet(name)
        for ended in self._tiers.poll() if self._tiers is not None else ():
            self._tier_load_ended(ended)
        self._check_deadlines(now_s)
        self._renew(now_s)
        self.lender.end_leases(now_s)
        self._settle_given_up()
        self._release_unneeded()
        fetched, self._fetched = self._fetched, []
        return fetched

    def _received(self, endpoint: str, message: Message) -> None:
        peer = self._peers.get(endpoint)
        if isinstance(message, Welcome):
            if peer is not None:
                self._met(peer, message)
            return
        if isinstance(message, Refused) and not message.lease:
            if peer is not None and peer.engine is None:
                self._refused_by(peer, message.reason)
            return
        if not isinstance(message, Offered | Confirmed | Refused):
            return
        hand_off = self._by_lease.get(message.lease)
        if hand_off is None or hand_off.peer != endpoint:
            if isinstance(message, Offered):
                # Nobody waits for it any more.
                self._link.send(endpoint, Release(lease=message.lease, reader=self.engine))
            return
        match message:
            case Offered():
                self._offered(hand_off, message)
            case Confirmed():
                self._confirmed(hand_off, message)
            case Refused() if hand_off.phase is Phase.ASKING:
                self._not_fetched(hand_off, message.reason)

    def _quiet(self, endpoint: str) -> None:
        """A peer that was cut off can be met again, if requests wait for it."""
        peer = self._peers.pop(endpoint, None)
        if peer is not None and self._of_peer(endpoint, Phase.ASKING):
            self._peers[endpoint] = fresh = Peer(endpoint, self._clock() + self.limits.answer_s)
            self._say_hello(fresh)

    def _check_deadlines(self, now_s: float) -> None:
        for peer in [each for each in self._peers.values() if each.engine is None and each.deadline_s <= now_s]:
            if peer.fencing:
                continue
            if peer.asked_again:
                self._refused_by(peer, "the prefill worker does not answer")
            else:
                peer.asked_again, peer.deadline_s = True, now_s + self.limits.answer_s
                self._say_hello(peer)
        for hand_off in [each for each in self._hand_offs.values() if 0.0 < each.deadline_s <= now_s]:
            if self._hand_offs.get(hand_off.sequence) is hand_off:
                self._too_late(hand_off, now_s)
        for hand_off in [each for each in self._reads.values() if 0.0 < each.deadline_s <= now_s]:
            # Its request was given up while it was read, and its pages wait for reads that do not end.
            hand_off.deadline_s = 0.0
            if (peer := self._peers.get(hand_off.peer)) is not None:
                self._cut_off(peer)
        for sequence in [name for name, limit_s in self._tier_limits_s.items() if limit_s <= now_s]:
            del self._tier_limits_s[sequence]
            self._scheduler.load_lost(sequence)

    def _too_late(self, hand_off: HandOff, now_s: float) -> None:
        peer = self._peers.get(hand_off.peer)
        if hand_off.phase is Phase.READING:
            hand_off.reason = "the prefill worker stopped sending"
            hand_off.deadline_s = 0.0
            if any(load.group in self._layout.target_groups for load in hand_off.open.values()):
                self._lose(hand_off)
            if peer is not None:
                # Reads that do not end may still land, unless their peer is cut off.
                self._cut_off(peer)
        elif hand_off.asked_again:
            hand_off.reason = "the prefill worker does not answer"
            if hand_off.phase is Phase.CONFIRMING:
                self._settle(hand_off, held=False)
            else:
                self._tell_released(hand_off)
                self._not_fetched(hand_off, hand_off.reason)
        else:
            hand_off.asked_again, hand_off.deadline_s = True, now_s + self.limits.answer_s
            if hand_off.phase is Phase.CONFIRMING:
                self._send_confirm(hand_off)
            elif peer is not None and peer.engine is not None and not peer.fencing:
                self._ask(hand_off, peer)

    def _lose(self, hand_off: HandOff) -> None:
        """Give up a hand-off without all of the target's KV, though some of its reads have not ended."""
        hand_off.failed += hand_off.open.values()
        self._scheduler.load_lost(hand_off.sequence)
        self._report(hand_off)
        self._forget(hand_off)
        self._settle_given_up()

    def _cut_off(self, peer: Peer) -> None:
        """End everything that is on its way from a peer; whoever still wants something of it meets it again."""
        if not peer.fencing:
            peer.fencing = True
            self.counters.fences += 1
            self._link.fence(peer.endpoint)

    def _renew(self, now_s: float) -> None:
        if now_s < self._renew_at_s:
            return
        endpoints = {each.peer for each in self._hand_offs.values() if each.offer is not None}
        known = [self._peers[name].renew_s for name in endpoints if name in self._peers]
        self._renew_at_s = now_s + min(known, default=self.limits.renew_s)
        leases: dict[str, list[bytes]] = {}
        for hand_off in self._hand_offs.values():
            if hand_off.offer is not None:
                leases.setdefault(hand_off.peer, []).append(hand_off.ticket.lease)
        for endpoint, names in leases.items():
            self._link.send(endpoint, Renew(leases=names, reader=self.engine))

    @property
    def next_deadline_s(self) -> float | None:
        """When `advance` has something to do at the latest, by the driver's clock."""
        waiting = (*self._hand_offs.values(), *self._reads.values())
        times = [each.deadline_s for each in waiting if each.deadline_s > 0.0]
        times += [peer.deadline_s for peer in self._peers.values() if peer.engine is None and not peer.fencing]
        times += self._tier_limits_s.values()
        if any(each.offer is not None for each in self._hand_offs.values()):
            times.append(self._renew_at_s)
        end_s = self.lender.leases.next_end_s
        return min([*times, end_s] if end_s is not None else times, default=None)

    @property
    def is_idle(self) -> bool:
        """Whether no KV is on its way, held for a peer, or in quarantine."""
        return not (self._hand_offs or self._reads or self._aside or self._tier_loads or len(self.lender.leases))

    def close(self) -> None:
        """End the link. Nothing lands after this returns."""
        self._link.close()
