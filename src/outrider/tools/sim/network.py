"""The virtual network: control messages that may be lost, late or twice, and what it knows about each lease.

    link of D ──frame──▶ [lost | late | twice] ──▶ desk of P ──frame──▶ [lost | late | twice] ──▶ events of D's link

Messages travel as encoded frames. A worker that is stopped answers when it goes on; one that is gone answers nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.tools.sim.faults import message_fate
from outrider.tools.sim.scenario import Scenario
from outrider.transfer.link import Received
from outrider.transfer.messages import (
    Confirm,
    Confirmed,
    Fetch,
    Message,
    Offered,
    Refused,
    Release,
    Renew,
    decode,
    encode,
)
from outrider.transfer.records import TransferLimits

if TYPE_CHECKING:
    from outrider.tools.sim.link import VirtualLink


@dataclass
class LeaseRecord:
    """What has happened to one lease: whether its hand-off ought to succeed."""

    name: str
    """The prefill worker's sequence, by which the fates of messages are drawn."""
    engine: str
    """The prefill worker that granted it."""
    fetched_at: int | None = None
    reader: str = ""
    troubled: bool = False
    """Whether something went wrong that the workers cannot be blamed for."""
    target_troubled: bool = False
    """Whether this may cost more than draft KV."""


class Network:
    def __init__(
        self,
        scenario: Scenario,
        limits: TransferLimits,
        counts: Counter[str],
        at: Callable[[int, Callable[[], None]], None],
        now: Callable[[], int],
    ) -> None:
        self._scenario = scenario
        self._limits = limits
        self._counts = counts
        self.at = at
        self._now = now
        self._links: dict[str, VirtualLink] = {}
        """Links that take messages, by endpoint."""
        self._sent: Counter[tuple[str, ...]] = Counter()
        self._last_arrival: dict[tuple[str, str], int] = {}
        self.leases: dict[bytes, LeaseRecord] = {}
        self._silences: dict[tuple[str, str], int] = {}
        """The last tick at which a reader's handshake with an endpoint was disturbed."""

    # ---- who is there ------------------------------------------------------------------------------

    def open(self, link: VirtualLink) -> None:
        self._links[link.endpoint] = link

    def close(self, link: VirtualLink) -> None:
        if self._links.get(link.endpoint) is link:
            del self._links[link.endpoint]

    def at_endpoint(self, endpoint: str) -> VirtualLink | None:
        return self._links.get(endpoint)

    # ---- messages ----------------------------------------------------------------------------------

    def ask(self, asker: VirtualLink, endpoint: str, message: Message) -> None:
        frame = encode(message)
        for delay in self._delays(asker, endpoint, message):
            self.at(delay, lambda: self._question(asker, endpoint, frame))

    def _question(self, asker: VirtualLink, endpoint: str, frame: bytes) -> None:
        link = self._links.get(endpoint)
        if link is None:
            self._counts["message_to_dead_worker"] += 1
            return
        if link.worker.stopped_for:
            self.at(link.worker.stopped_for, lambda: self._question(asker, endpoint, frame))
            return
        message = decode(frame)
        if isinstance(message, Fetch) and message.lease in self.leases:
            record = self.leases[message.lease]
            record.reader = record.reader or message.reader
        answer = link.desk.answer(message, link.introduction)
        if answer is None:
            return
        frame = encode(answer)
        for delay in self._delays(asker, endpoint, answer):
            self.at(delay, lambda: self._answer(asker, endpoint, frame))

    def _answer(self, asker: VirtualLink, endpoint: str, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Confirmed) and not message.held:
            self._counts["not_held"] += 1
        asker.report(Received(endpoint, message))

    def _delays(self, asker: VirtualLink, endpoint: str, message: Message) -> tuple[int, ...]:
        """Returns the ticks until each copy of a message arrives, after noting what goes wrong with it."""
        kind, leases = type(message).__name__, _leases_of(message)
        named = " ".join(self.leases[lease].name for lease in leases if lease in self.leases)
        name = (kind, named, asker.worker.engine, endpoint)
        self._sent[name] += 1
        fate = message_fate(self._scenario, *name, self._sent[name])
        if fate.kind:
            self._counts[f"message_{fate.kind}"] += 1
        if fate.kind in ("lost", "late"):
            for lease in leases:
                self.trouble(lease)
            if not leases:
                self.disturb(asker.worker.engine, endpoint, max(fate.delays, default=0))
        way = (asker.endpoint + kind[-2:], endpoint)
        for delay in fate.delays:
            arrival = self._now() + delay
            self._counts["message_reordered"] += arrival < self._last_arrival.get(way, 0)
            self._last_arrival[way] = max(arrival, self._last_arrival.get(way, 0))
        return fate.delays

    # ---- what hand-offs may be expected to do ------------------------------------------------------

    def trouble(self, lease: bytes, *, target: bool = True) -> None:
        """Note that a hand-off may fail, through no fault of the workers."""
        record = self.leases.get(lease)
        if record is not None:
            record.troubled = True
            record.target_troubled |= target

    def trouble_worker(self, engine: str) -> None:
        """Note that a worker died, stopped, or lost a step: all its hand-offs may fail."""
        for lease, record in self.leases.items():
            if engine in (record.engine, record.reader):
                self.trouble(lease)

    def disturb(self, reader: str, endpoint: str, ticks: int = 0) -> None:
        """Note that a reader's handshake with an endpoint may fail, and hand-offs that wait for it with it."""
        tick = self._now() + ticks
        self._silences[reader, endpoint] = max(tick, self._silences.get((reader, endpoint), 0))

    def disturb_endpoint(self, endpoint: str, readers: list[str], ticks: int = 0) -> None:
        for reader in readers:
            self.disturb(reader, endpoint, ticks)

    def ought_to_succeed(self, lease: bytes, reader: str, endpoint: str, *, target_only: bool = False) -> bool:
        record = self.leases.get(lease)
        if record is None or record.fetched_at is None or record.reader != reader:
            return False
        silence = self._silences.get((reader, endpoint))
        if silence is not None and silence >= record.fetched_at - 2 * self._limits.answer_s - 4:
            return False
        return not (record.target_troubled if target_only else record.troubled)


def _leases_of(message: Message) -> list[bytes]:
    if isinstance(message, Renew):
        return message.leases
    if isinstance(message, Fetch | Offered | Confirm | Confirmed | Release):
        return [message.lease]
    return [message.lease] if isinstance(message, Refused) and message.lease else []
