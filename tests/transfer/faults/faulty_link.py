"""A link that loses, delays, repeats and reorders what passes through it, and holds reads and fences back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from outrider.transfer.link import Event, Failed, GroupRead, Landed, Link, Quiet, Received
from outrider.transfer.messages import Confirm, Fetch, Message

Delays = Callable[[str, Message], list[float]]
"""When a message to a peer, or from one, is delivered: in seconds from now, once for each copy. Empty: it is lost."""


def at_once(_peer: str, _message: Message) -> list[float]:
    return [0.0]


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic


class RealClock:
    """Time as it passes."""

    monotonic = staticmethod(time.monotonic)

    @property
    def now_s(self) -> float:
        return time.monotonic()


@dataclass(slots=True)
class HeldRead:
    peer: str
    read: GroupRead
    number: int


@dataclass(slots=True)
class Rules:
    """What happens to messages and reads; tests change it while requests run."""

    sent: Delays = at_once
    received: Delays = at_once
    tampers: Callable[[Message], Message] = lambda message: message
    """What a peer that lies says instead."""
    stopped: set[str] = field(default_factory=set)
    """Peers that neither answer nor send: what goes to them waits until they go on."""
    holds: Callable[[Message], bool] = lambda _message: False
    """Which messages to peers wait until a test releases them."""
    holds_reads: bool = False
    holds_fences: bool = False
    fails_read: Callable[[GroupRead], bool] = lambda _read: False


class FaultyLink:
    """Wraps the link of a decode worker; see `transfer.link.Link`."""

    def __init__(self, inner: Link, clock: Clock | RealClock) -> None:
        self.inner = inner
        self.rules = Rules()
        self.fenced: list[str] = []
        self.late_copies = 0
        """Reads that were copied after they had been held back."""
        self._clock = clock
        self._numbers = count(1_000_000)
        self._places = count()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._stopped: list[tuple[str, Message]] = []
        self._held_messages: list[tuple[str, Message]] = []
        self._held: list[HeldRead] = []
        self._held_fences: list[str] = []
        self._own: dict[int, int] = {}
        """The driver's numbers of reads that the real link copies, by the real link's."""
        self._events: list[Event] = []

    # --- what tests ask for ---------------------------------------------------------------------------

    @property
    def num_copying(self) -> int:
        """Number of reads of the real link that have not ended."""
        return len(self._own)

    @property
    def num_held_reads(self) -> int:
        return len(self._held)

    def open(self) -> None:
        """Let through everything that waits, but for peers that are stopped."""
        self.rules.holds, self.rules.holds_reads = lambda _message: False, False
        held, self._held_messages = self._held_messages, []
        for peer, message in held:
            self.send(peer, message)
        self.release_reads()

    def continue_peer(self, peer: str) -> None:
        """Let a stopped peer go on: it receives everything that waited."""
        self.rules.stopped.discard(peer)
        waiting, self._stopped = self._stopped, []
        for each, message in waiting:
            self.send(each, message)
        self.release_reads()

    def release_reads(self) -> None:
        held = [read for read in self._held if read.peer not in self.rules.stopped]
        self._held = [read for read in self._held if read not in held]
        for read in held:
            self.late_copies += 1
            self._start(read)

    def hold(self, phase: str) -> None:
        """Keep the next request in a phase, by its letter in the failure table, until `open` lets it go on."""
        held = {"c": (Fetch,), "f": (Confirm,)}.get(phase, ())
        self.rules.holds = lambda message: isinstance(message, held)
        self.rules.holds_reads = phase == "e"

    def release_fences(self) -> None:
        self.rules.holds_fences = False
        fences, self._held_fences = self._held_fences, []
        for peer in fences:
            self._fence(peer)

    # --- the interface --------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return self.inner.endpoint

    @property
    def transport(self) -> str:
        return self.inner.transport

    def introduction(self) -> bytes:
        return self.inner.introduction()

    def meet(self, peer: str, introduction: bytes) -> None:
        self.inner.meet(peer, introduction)

    def send(self, peer: str, message: Message) -> None:
        if peer in self.rules.stopped:
            self._stopped.append((peer, message))
            return
        if self.rules.holds(message):
            self._held_messages.append((peer, message))
            return
        for delay_s in self.rules.sent(peer, message):
            if delay_s:
                self._later(delay_s, lambda: self.inner.send(peer, message))
            else:
                self.inner.send(peer, message)

    def read(self, peer: str, read: GroupRead) -> int:
        number = next(self._numbers)
        wanted = HeldRead(peer, read, number)
        if self.rules.fails_read(read):
            self._events.append(Failed(number, "a test lets this read fail"))
        elif self.rules.holds_reads or peer in self.rules.stopped:
            self._held.append(wanted)
        else:
            self._start(wanted)
        return number

    def _start(self, wanted: HeldRead) -> None:
        self._own[self.inner.read(wanted.peer, wanted.read)] = wanted.number

    def look(self) -> None:
        """Take in what the real link reports, for the next poll."""
        self._events = self.poll()

    def poll(self) -> list[Event]:
        due = sorted(each for each in self._waiting if each[0] <= self._clock.now_s)
        self._waiting = [each for each in self._waiting if each not in due]
        for _time, _place, deliver in due:
            deliver()
        for event in self.inner.poll():
            match event:
                case Received(peer=peer, message=message):
                    self._receive(peer, message)
                case Landed(transfer=number):
                    self._events.append(Landed(self._own.pop(number)))
                case Failed(transfer=number, reason=reason):
                    self._events.append(Failed(self._own.pop(number), reason))
                case Quiet():
                    self._events.append(event)
        events, self._events = self._events, []
        return events

    def _receive(self, peer: str, message: Message) -> None:
        for delay_s in self.rules.received(peer, message):
            event = Received(peer, self.rules.tampers(message))
            if delay_s:
                self._later(delay_s, lambda event=event: self._events.append(event))  # type: ignore[misc]
            else:
                self._events.append(event)

    def _later(self, delay_s: float, deliver: Callable[[], None]) -> None:
        self._waiting.append((self._clock.now_s + delay_s, next(self._places), deliver))

    def fence(self, peer: str) -> None:
        self.fenced.append(peer)
        if self.rules.holds_fences:
            self._held_fences.append(peer)
        else:
            self._fence(peer)

    def _fence(self, peer: str) -> None:
        for read in [read for read in self._held if read.peer == peer]:
            self._held.remove(read)
            self._events.append(Failed(read.number, "reading was given up"))
        self.inner.fence(peer)

    def forget(self, peer: str) -> None:
        self.inner.forget(peer)

    def fileno(self) -> int:
        return self.inner.fileno()

    def wait(self, limit_s: float) -> None:
        self.inner.wait(limit_s)

    def close(self) -> None:
        self.inner.close()
