"""The hand-offs of a decode worker: where each stands, and how it ended."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from outrider.kv.intervals import SlotRun
from outrider.kv.ledger import Load
from outrider.transfer.offers import Offer
from outrider.transfer.tickets import Ticket


class Phase(Enum):
    ASKING = "asking"
    QUEUED = "queued"
    READING = "reading"
    CONFIRMING = "confirming"


class Settled(NamedTuple):
    """How a hand-off ended, for the request's own figures."""

    sequence: str
    cached_tokens: int
    """Prompt tokens that were in the local cache."""
    transferred_tokens: int
    bytes: int
    queued_s: float
    """From the offer until pages were free and reading began."""
    read_s: float
    confirmed_s: float
    """From the last byte until the prefill worker had confirmed."""
    reason: str
    """Why some or all of the KV did not arrive; empty if all of it did."""
    peer: str
    """Endpoint of the prefill worker, for logs: clients must not learn it."""


@dataclass(slots=True, eq=False)
class HandOff:
    """One request's KV on its way to this worker."""

    sequence: str
    ticket: Ticket
    takes_token: bool
    phase: Phase
    since_s: float
    """When the phase began."""
    deadline_s: float = 0.0
    asked_again: bool = False
    question: int = 0
    """Number under which P is asked whether the lease held; new once all reads have ended."""
    offer: Offer | None = None
    pulls: dict[Load, tuple[SlotRun, ...]] = field(default_factory=dict)
    """Loads that a peer sends, with the slots to copy."""
    remote_groups: dict[int, int] = field(default_factory=dict)
    """P's number of each group that is read."""
    open: dict[int, Load] = field(default_factory=dict)
    """Reads that have not ended, by number."""
    landed: list[Load] = field(default_factory=list)
    failed: list[Load] = field(default_factory=list)
    reason: str = ""
    cached_tokens: int = 0
    wanted_tokens: int = 0
    queued_s: float = 0.0
    read_s: float = 0.0

    @property
    def peer(self) -> str:
        return self.ticket.endpoint

    @property
    def landed_slots(self) -> list[tuple[int, int, int]]:
        """(P's group number, start, end) of what has landed. The peer itself may be cut off and forgotten by now."""
        return [(self.remote_groups[load.group], load.interval.start, load.interval.end) for load in self.landed]

    def without_address(self, reason: str) -> str:
        """Returns a reason as clients may read it."""
        return reason.replace(self.peer, "the prefill worker")

    def settled(self, *, transferred_bytes: int, confirmed_s: float, target_groups: Container[int]) -> Settled:
        # Without the drafter's KV the prompt has arrived all the same.
        complete = not any(load.group in target_groups for load in self.failed)
        return Settled(
            self.sequence,
            self.cached_tokens,
            self.wanted_tokens if complete else 0,
            transferred_bytes,
            self.queued_s,
            self.read_s,
            confirmed_s,
            self.without_address(self.reason),
            self.peer,
        )


class HandOffs:
    """All hand-offs of a worker, by request, by lease and by read."""

    def __init__(self) -> None:
        self._by_sequence: dict[str, HandOff] = {}
        self._by_lease: dict[bytes, HandOff] = {}
        self._by_read: dict[int, HandOff] = {}
        """Reads that have not ended, by number; those of hand-offs that were given up too."""

    def add(self, hand_off: HandOff) -> None:
        self._by_sequence[hand_off.sequence] = hand_off

    def claim(self, hand_off: HandOff) -> None:
        """Note that a hand-off asks for the lease of its ticket."""
        self._by_lease[hand_off.ticket.lease] = hand_off

    def forget(self, hand_off: HandOff) -> None:
        """Drop a hand-off; reads that are still open are followed until they end."""
        if self.is_current(hand_off):
            del self._by_sequence[hand_off.sequence]
        if self._by_lease.get(hand_off.ticket.lease) is hand_off:
            del self._by_lease[hand_off.ticket.lease]

    def is_current(self, hand_off: HandOff) -> bool:
        return self._by_sequence.get(hand_off.sequence) is hand_off

    def of(self, sequence: str) -> HandOff | None:
        return self._by_sequence.get(sequence)

    def of_lease(self, lease: bytes) -> HandOff | None:
        return self._by_lease.get(lease)

    def of_peer(self, peer: str, phase: Phase) -> list[HandOff]:
        return [each for each in self._by_sequence.values() if each.peer == peer and each.phase is phase]

    def peers_in_use(self) -> set[str]:
        """Returns the endpoints of peers that hand-offs, or reads of hand-offs that were given up, still need."""
        return {each.peer for each in (*self._by_sequence.values(), *self._by_read.values())}

    def current(self) -> list[HandOff]:
        return list(self._by_sequence.values())

    def leases(self) -> dict[str, list[bytes]]:
        """Returns the leases that must not run out, by the peer that granted them."""
        leases: dict[str, list[bytes]] = {}
        for hand_off in self._by_sequence.values():
            if hand_off.offer is not None:
                leases.setdefault(hand_off.peer, []).append(hand_off.ticket.lease)
        return leases

    def overdue(self, now_s: float) -> list[HandOff]:
        """Returns the hand-offs whose deadline has passed, with those that were given up and still have reads open."""
        return [each for each in self._with_deadline() if each.deadline_s <= now_s]

    @property
    def deadlines_s(self) -> list[float]:
        return [each.deadline_s for each in self._with_deadline()]

    def _with_deadline(self) -> list[HandOff]:
        given_up = dict.fromkeys(each for each in self._by_read.values() if not self.is_current(each))
        return [each for each in (*self._by_sequence.values(), *given_up) if each.deadline_s > 0.0]

    # ---- reads -------------------------------------------------------------------------------------

    def read_started(self, number: int, hand_off: HandOff, load: Load) -> None:
        hand_off.open[number] = load
        self._by_read[number] = hand_off

    def read_ended(self, number: int) -> HandOff | None:
        """Returns the hand-off that a read belongs to; None if it has ended before."""
        return self._by_read.pop(number, None)

    def is_read(self, lease: bytes) -> bool:
        """Whether reads under a lease have not ended, though their hand-off may have been given up."""
        return any(each.ticket.lease == lease for each in self._by_read.values())

    def reads_of(self, sequence: str) -> set[int]:
        return {number for number, each in self._by_read.items() if each.sequence == sequence}

    @property
    def is_idle(self) -> bool:
        return not self._by_sequence and not self._by_read
