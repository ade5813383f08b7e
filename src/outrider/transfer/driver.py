"""The state machine of hand-offs: the engine and the simulation run this very code. Torch-free.

On the prefill worker (P), `hand_over` grants a lease for a prompt that was computed and returns a sealed ticket. The
`Desk` answers the decode worker meanwhile; `advance` gives pages back when a lease has ended.

On the decode worker (D), a hand-off runs through these phases:

    fetch ─▶ ASKING ──Offered──▶ QUEUED ──loads──▶ READING ──all ended──▶ CONFIRMING ──Confirmed──▶ settled
                │                   │                 │                       │
                └── no answer ──────┴── aborted ──────┴── too late, failed ───┴──▶ computed here, or failed

Nothing that was read is used before P has confirmed that its lease held from the offer until after the last byte. Pages
of a read that was given up stay in quarantine until the link says that the read has ended.

    engine step:   advance ─▶ schedule ─▶ start_loads ─▶ run ─▶ commit ─▶ hand_over, offloading.store
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from outrider.errors import TransferError
from outrider.kv.ledger import Load
from outrider.scheduler import Scheduler, State
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.comparison import take_back_what_differs
from outrider.transfer.hand_offs import HandOff, HandOffs, Phase, Settled
from outrider.transfer.lending import Lender
from outrider.transfer.link import Failed, GroupRead, Landed, Link, Quiet, Received
from outrider.transfer.messages import Confirm, Confirmed, Fetch, Message, Offered, Refused, Release, Renew, Welcome
from outrider.transfer.offers import from_wire, offered_intervals, plan_pull, signatures
from outrider.transfer.offloading import Offloading, TierChecks
from outrider.transfer.peers import Peer, Peers
from outrider.transfer.quarantine import Quarantine
from outrider.transfer.records import Fetched, FirstToken, TransferChecks
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
        tiers: Sequence[CacheTier] = (),
        checks: TransferChecks | None = None,
        tier_checks: TierChecks | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`lender`: the same worker's own promises, which its link answers for. `vocab_size`: number of tokens that a
        prefill worker may name; None if any may be."""
        self.engine = lender.engine
        self.limits = lender.limits
        self.counters = lender.counters
        self.lender = lender
        self.checks = checks
        self._vocab_size = vocab_size
        self._scheduler = scheduler
        self._layout = scheduler.kv.layout
        self._identity = scheduler.kv.config.identity
        self._signatures = signatures(self._layout, self._identity)
        self._link = link
        self._clock = clock
        self._time_of_day = time_of_day
        self._hand_offs = HandOffs()
        self._quarantine = Quarantine(scheduler.kv.restore_quarantined)
        self._peers = Peers(
            link,
            self._layout,
            self._identity,
            reader=self.engine,
            limits=self.limits,
            counters=self.counters,
            clock=clock,
        )
        self.offloading = Offloading(tiers, scheduler, limits=self.limits, clock=clock, checks=tier_checks)
        self._fetched: list[Fetched] = []
        self._settled: list[Settled] = []
        self._renew_at_s = 0.0
        self._questions = itertools.count(1)

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
        self._hand_offs.add(hand_off)
        reason = ticket.refusal(binding, self._time_of_day())
        if not reason and self._hand_offs.of_lease(ticket.lease) is not None:
            reason = "the ticket is in use by another request"
        if reason:
            self._not_fetched(hand_off, reason)
            return
        self._hand_offs.claim(hand_off)
        hand_off.deadline_s = now_s + self.limits.answer_s
        peer = self._peers.get(ticket.endpoint)
        if peer is None:
            self._peers.approach(ticket.endpoint)
        elif peer.engine is not None and not peer.fencing:
            self._ask(hand_off, peer)

    def decline(self, ticket: Ticket, *, binding: bytes) -> None:
        """Let the prefill worker of a ticket know that its KV is not needed, unless another request reads it or the
        ticket is for another prompt: a ticket that is repeated takes nothing away from its owner."""
        if ticket.binding != binding or self._hand_offs.of_lease(ticket.lease) is not None:
            return
        self._link.send(ticket.endpoint, Release(lease=ticket.lease, reader=self.engine))

    def _ask(self, hand_off: HandOff, peer: Peer) -> None:
        peer.used_s = self._clock()
        if peer.engine == hand_off.ticket.engine:
            self._link.send(peer.endpoint, Fetch(lease=hand_off.ticket.lease, reader=self.engine))
        else:
            # Either the ticket is of a worker that is gone, or the worker that is known is.
            self._peers.greet(peer)

    def _met(self, endpoint: str, message: Welcome) -> None:
        waiting = self._hand_offs.of_peer(endpoint, Phase.ASKING)
        try:
            peer = self._peers.welcome(endpoint, message)
        except TransferError as error:
            self._none_fetched(waiting, str(error))
            return
        for hand_off in waiting if peer is not None else ():
            assert peer is not None
            if hand_off.ticket.engine == peer.engine:
                self._ask(hand_off, peer)
            else:
                self._not_fetched(hand_off, "the prefill worker was restarted since it handed the prompt over")

    def _refused_by(self, peer: Peer, reason: str) -> None:
        """Note that no KV of a peer is of use here; the next ticket is tried anew."""
        self._peers.forget(peer)
        self._none_fetched(self._hand_offs.of_peer(peer.endpoint, Phase.ASKING), reason)

    def _none_fetched(self, hand_offs: Sequence[HandOff], reason: str) -> None:
        for hand_off in hand_offs:
            self._not_fetched(hand_off, reason)

    def _offered(self, hand_off: HandOff, message: Offered) -> None:
        peer = self._peers.get(hand_off.peer)
        if hand_off.phase is not Phase.ASKING or peer is None or peer.engine is None:
            return
        try:
            request = self._scheduler.requests.get(hand_off.sequence)
            if request is not None and message.num_tokens != request.prompt_len:
                raise TransferError(f"offer of {message.engine} is for a prompt of another length")
            offer = from_wire(message, peer.signatures)
            if offer.engine != hand_off.ticket.engine or offer.binding != hand_off.ticket.binding:
                raise TransferError(f"{offer} is for another prompt than its ticket")
            if self._vocab_size is not None:
                offer.check_tokens(self._vocab_size)
            remote = offered_intervals(self._layout, self._identity, offer)
        except TransferError as error:
            self._not_fetched(hand_off, str(error))
            return
        hand_off.offer = offer
        self.counters.draft_groups_missing += peer.lacks_groups
        self._enter(hand_off, Phase.QUEUED, self.limits.lease_s)
        self._renew_at_s = min(self._renew_at_s, hand_off.since_s + peer.renew_s)
        self._fetched.append(Fetched(hand_off.sequence, offer))
        if hand_off.takes_token:
            self._scheduler.fetched(hand_off.sequence, remote, offer.first_token, drafts=len(offer.drafts))
        else:
            self._scheduler.fetched(hand_off.sequence, remote, None)

    def _not_fetched(self, hand_off: HandOff, reason: str) -> None:
        self.counters.fetch_failures += 1
        self._hand_offs.forget(hand_off)
        self._fetched.append(Fetched(hand_off.sequence, None, hand_off.without_address(reason), hand_off.peer))
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
            hand_off = self._hand_offs.of(sequence)
            self.offloading.start(sequence, [load for load in loads if load.key is not None])
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
        for hand_off in [each for each in self._hand_offs.current() if each.phase is Phase.QUEUED]:
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
            hand_off.remote_groups[load.group] = remote_group
            self._hand_offs.read_started(number, hand_off, load)
        self._maybe_confirm(hand_off)

    def _read_ended(self, number: int, reason: str | None) -> None:
        hand_off = self._hand_offs.read_ended(number)
        if hand_off is None:
            return
        self._quarantine.read_ended(number)
        load = hand_off.open.pop(number)
        if reason is None:
            hand_off.landed.append(load)
        else:
            hand_off.failed.append(load)
            hand_off.reason = reason
        if self._hand_offs.is_current(hand_off):
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
        hand_off.question = next(self._questions)
        self._send_confirm(hand_off)

    def _send_confirm(self, hand_off: HandOff) -> None:
        compares = self.checks is not None and self.checks.compares_bytes
        digests_of = hand_off.landed_slots if compares else []
        lease, question = hand_off.ticket.lease, hand_off.question
        self._link.send(
            hand_off.peer, Confirm(lease=lease, reader=self.engine, question=question, digests_of=digests_of)
        )

    def _confirmed(self, hand_off: HandOff, message: Confirmed) -> None:
        if hand_off.phase is not Phase.CONFIRMING or message.question != hand_off.question:
            return
        if not message.held:
            hand_off.reason = "the prefill worker's lease ended before everything had been read"
        elif self.checks is not None and self.checks.compares_bytes:
            take_back_what_differs(hand_off, message.digests, self.checks)
        self._settle(hand_off, held=message.held)

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
        moved = sum(self._load_bytes(load) for load in hand_off.landed)
        confirmed_s = self._clock() - hand_off.since_s if hand_off.phase is Phase.CONFIRMING else 0.0
        target_groups = self._layout.target_groups
        settled = hand_off.settled(transferred_bytes=moved, confirmed_s=confirmed_s, target_groups=target_groups)
        self.counters.fetch_failures += bool(hand_off.failed or hand_off.reason)
        self.counters.transferred_tokens += settled.transferred_tokens
        self.counters.transferred_bytes += moved
        self._settled.append(settled)

    def _load_bytes(self, load: Load) -> int:
        return load.interval.size * self._layout.groups[load.group].slot_bytes

    def take_settled(self) -> list[Settled]:
        """Returns the hand-offs that have ended since the last call."""
        settled, self._settled = self._settled, []
        return settled

    # ---- letting go --------------------------------------------------------------------------------

    def _release(self, hand_off: HandOff) -> None:
        """End a hand-off: P may give its pages back, now or once the reads that are still open have ended."""
        self._hand_offs.forget(hand_off)
        if not hand_off.open:
            self._tell_released(hand_off)

    def _tell_released(self, hand_off: HandOff) -> None:
        """Tell P that its pages are not needed, unless a ticket that came again serves another request, or reads of a
        request that was given up have not ended: the last of them tells it."""
        lease = hand_off.ticket.lease
        if self._hand_offs.of_lease(lease) in (None, hand_off) and not self._hand_offs.is_read(lease):
            self._link.send(hand_off.peer, Release(lease=lease, reader=self.engine))

    def _settle_given_up(self) -> None:
        """Follow requests that the scheduler gave up: aborted, failed, or lost with an interrupted step."""
        for sequence, pages in self._scheduler.take_given_up():
            # Before the next step writes to the pages.
            self.lender.withdraw(sequence)
            hand_off = self._hand_offs.of(sequence)
            reads, loads = self._hand_offs.reads_of(sequence), self.offloading.give_up(sequence)
            self._quarantine.add(pages, peer_reads=reads, tier_loads=loads)
            request = self._scheduler.requests.get(sequence)
            if hand_off is not None and (request is None or request.state is not State.LOADING):
                self._release(hand_off)
        self._quarantine.give_back()

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
        for number in self.offloading.poll():
            self._quarantine.load_ended(number)
        self._check_deadlines(now_s)
        self._renew(now_s)
        self.lender.end_leases(now_s)
        self._settle_given_up()
        self._release_unneeded()
        self.offloading.store()
        fetched, self._fetched = self._fetched, []
        return fetched

    def _received(self, endpoint: str, message: Message) -> None:
        peer = self._peers.get(endpoint)
        if isinstance(message, Welcome):
            self._met(endpoint, message)
            return
        if isinstance(message, Refused) and not message.lease:
            if peer is not None and peer.engine is None:
                self._refused_by(peer, message.reason)
            return
        if not isinstance(message, Offered | Confirmed | Refused):
            return
        hand_off = self._hand_offs.of_lease(message.lease)
        if hand_off is None or hand_off.peer != endpoint:
            if isinstance(message, Offered) and not self._hand_offs.is_read(message.lease):
                # No request waits for it any more, and it is not the repetition of an offer whose pages are being read.
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
        self._peers.quiet(endpoint)
        if self._hand_offs.of_peer(endpoint, Phase.ASKING):
            self._peers.approach(endpoint)

    def _check_deadlines(self, now_s: float) -> None:
        for peer in self._peers.overdue(now_s):
            self._refused_by(peer, "the prefill worker does not answer")
        for hand_off in self._hand_offs.overdue(now_s):
            if self._hand_offs.is_current(hand_off):
                self._too_late(hand_off, now_s)
            elif hand_off.open:
                # It was given up, but its pages cannot be given back before its reads have ended.
                self._end_reads(hand_off)
        self.offloading.check_deadlines(now_s)
        self._peers.forget_idle(now_s, self._hand_offs.peers_in_use)

    def _too_late(self, hand_off: HandOff, now_s: float) -> None:
        peer = self._peers.get(hand_off.peer)
        if hand_off.phase is Phase.READING:
            hand_off.reason = "the prefill worker stopped sending"
            if any(load.group in self._layout.target_groups for load in hand_off.open.values()):
                self._lose(hand_off)
            self._end_reads(hand_off)
        elif hand_off.phase is Phase.QUEUED:
            self._waited(hand_off, now_s)
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

    def _waited(self, hand_off: HandOff, now_s: float) -> None:
        """Let a request go on waiting for pages, unless this worker holds pages for others: two workers that hold for
        each other what each of them waits for would wait for ever."""
        if self.lender.leases:
            self._tell_released(hand_off)
            self._not_fetched(hand_off, "no pages became free in time, while this worker holds some for others")
        else:
            hand_off.deadline_s = now_s + self.limits.lease_s

    def _end_reads(self, hand_off: HandOff) -> None:
        """Cut off a peer that has not sent everything in time: otherwise what is missing may still land at any time."""
        hand_off.deadline_s = 0.0
        peer = self._peers.get(hand_off.peer)
        if peer is not None:
            self._peers.cut_off(peer)

    def _lose(self, hand_off: HandOff) -> None:
        """Give up a hand-off without all of the target's KV, though some of its reads have not ended."""
        hand_off.failed += hand_off.open.values()
        self._scheduler.load_lost(hand_off.sequence)
        self._report(hand_off)
        self._hand_offs.forget(hand_off)
        self._settle_given_up()

    def _renew(self, now_s: float) -> None:
        if now_s < self._renew_at_s:
            return
        leases = self._hand_offs.leases()
        peers = [peer for peer in map(self._peers.get, leases) if peer is not None and peer.engine is not None]
        self._renew_at_s = now_s + min((peer.renew_s for peer in peers), default=self.limits.renew_s)
        for endpoint, names in leases.items():
            self._link.send(endpoint, Renew(leases=names, reader=self.engine))

    @property
    def next_deadline_s(self) -> float | None:
        """When `advance` has something to do at the latest, by the driver's clock."""
        times = [*self._hand_offs.deadlines_s, *self._peers.deadlines_s, *self.offloading.deadlines_s]
        if any(each.offer is not None for each in self._hand_offs.current()):
            times.append(self._renew_at_s)
        end_s = self.lender.leases.next_end_s
        return min([*times, end_s] if end_s is not None else times, default=None)

    @property
    def is_idle(self) -> bool:
        """Whether no KV is on its way, held for a peer, or in quarantine."""
        idle = self._hand_offs.is_idle and self.offloading.is_idle
        return idle and not (self._quarantine or self.lender.leases)

    def close(self) -> None:
        """End the link and the tiers. Nothing lands after this returns."""
        self._link.close()
        self.offloading.close()
