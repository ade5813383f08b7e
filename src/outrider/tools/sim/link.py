"""A link on the virtual clock: `transfer.link.Link` between simulated workers.

Reads copy slots, with the identities that the sender's shadow memory has for them at that very tick, in up to three
parts. They may fail, be late or never end; until a fence has taken effect they may still land.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from outrider.errors import InvariantViolation, TransferError
from outrider.kv.intervals import SlotRun
from outrider.tools.sim.faults import ReadFate, read_fate
from outrider.tools.sim.network import Network
from outrider.tools.sim.oracle import EMPTY_SLOT, chance
from outrider.transfer.desk import Desk
from outrider.transfer.link import Event, Failed, GroupRead, Landed, Quiet
from outrider.transfer.messages import Message, Release

if TYPE_CHECKING:
    from outrider.tools.sim.worker import Worker

PARTS = 3


@dataclass(eq=False)
class _Read:
    number: int
    peer: str
    engine: str
    """The process whose memory is read."""
    sequence: str
    read: GroupRead
    fate: ReadFate
    parts_left: int = 0
    ended: bool = False


class VirtualLink:
    def __init__(self, worker: Worker, network: Network, desk: Desk, endpoint: str) -> None:
        self.worker = worker
        self.desk = desk
        self._network = network
        self._endpoint = endpoint
        self._met: dict[str, str] = {}
        """Engine ids of the peers that were met, by endpoint."""
        self._numbers = count()
        self._open: dict[int, _Read] = {}
        self._events: list[Event] = []
        self._closed = False

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def transport(self) -> str:
        return "virtual"

    def introduction(self) -> bytes:
        return self.worker.engine.encode()

    def meet(self, peer: str, introduction: bytes) -> None:
        self._met[peer] = introduction.decode()

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, Release):
            self._check_release(message.lease)
        self._network.ask(self, peer, message)

    def _check_release(self, lease: bytes) -> None:
        """I10: the sender is told that its pages are not needed only once nothing reads them any more."""
        reading = [read.sequence for read in self._open.values() if self.worker.lease_of(read.sequence) == lease]
        if reading:
            raise InvariantViolation("I10", f"the lease of {reading[0]} is released while its pages are being read")

    # ---- reads -------------------------------------------------------------------------------------

    def read(self, peer: str, read: GroupRead) -> int:
        engine = self._met.get(peer)
        if engine is None:
            raise TransferError(f"{peer} is not connected")
        number, worker = next(self._numbers), self.worker
        sequence = worker.holder(read.group, read.runs[0].destination_page)
        name = (sequence, f"{worker.engine}:{worker.layout.groups[read.group].name}:{read.runs[0].start}")
        fate = read_fate(worker.scenario, *name)
        self._open[number] = made = _Read(number, peer, engine, sequence, read, fate)
        if fate.kind:
            worker.counts[f"read_{fate.kind}"] += 1
            self._network.trouble(worker.lease_of(sequence), target=read.group in worker.layout.target_groups)
        size = -(-len(read.runs) // PARTS)
        parts = [read.runs[first : first + size] for first in range(0, len(read.runs), size)]
        made.parts_left = len(parts)
        for runs, delay in zip(parts, fate.delays[-len(parts) :], strict=True):
            self._at(delay, made, runs)
        return number

    def _at(self, delay: int, read: _Read, runs: tuple[SlotRun, ...]) -> None:
        self._network.at(delay, lambda: self._land(read, runs))

    def _land(self, read: _Read, runs: tuple[SlotRun, ...]) -> None:
        """Copy a part of a read, as far as the peer's memory is there."""
        worker = self.worker
        if read.ended or self._closed:
            return
        link = self._network.at_endpoint(read.peer)
        source = link.worker if link is not None and link.worker.engine == read.engine else None
        if source is None or not source.alive:
            # The end of a process is noticed, that of its machine is not.
            if chance(worker.scenario.seed, "noticed", read.engine, worker.engine) < 0.6:
                self._end(read, "the prefill worker is gone")
            else:
                worker.counts["read_of_dead_worker_hung"] += 1
            return
        if source.stopped_for and chance(worker.scenario.seed, "shared memory", read.engine, worker.engine) < 0.6:
            # Over a network, a stopped process sends nothing until it goes on.
            self._at(source.stopped_for, read, runs)
            return
        read.parts_left -= 1
        last = not read.parts_left
        if last and read.fate.kind == "failed":
            self._end(read, "the connection was lost")
            return
        damaged = last and read.fate.kind == "damaged"
        for run in runs:
            self._copy(source, read, run, damaged=damaged and run is runs[-1])
        if last and read.fate.kind != "hung":
            self._end(read, None)

    def _copy(self, source: Worker, read: _Read, run: SlotRun, *, damaged: bool) -> None:
        worker, group = self.worker, read.read.group
        remote = read.read.remote_group
        there, here = run.source_offset, run.destination_offset
        ids, states = source.sanitizer.steps.slots(remote, run.source_page, there, run.slots)
        values = source.device.memory[source.layout.arena_of[remote]][run.source_page][there : there + run.slots]
        if damaged:
            ids[-1], values[-1] = 0, EMPTY_SLOT
        if not worker.is_loading(read.sequence):
            worker.counts["landed_in_quarantine"] += 1
        worker.sanitizer.steps.landed(read.sequence, group, run.destination_page, here, ids, states, f"{read.engine}")
        memory = worker.device.memory[worker.layout.arena_of[group]][run.destination_page]
        memory[here : here + run.slots] = values

    def _end(self, read: _Read, reason: str | None) -> None:
        read.ended = True
        del self._open[read.number]
        self.report(Landed(read.number) if reason is None else Failed(read.number, reason))

    def is_reading(self, sequence: str) -> bool:
        return any(read.sequence == sequence for read in self._open.values())

    def is_reading_target(self, sequence: str) -> bool:
        targets = self.worker.layout.target_groups
        return any(read.sequence == sequence and read.read.group in targets for read in self._open.values())

    # ---- events ------------------------------------------------------------------------------------

    def report(self, event: Event) -> None:
        if not self._closed:
            self._events.append(event)
            self.worker.wake()

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def fence(self, peer: str) -> None:
        self._met.pop(peer, None)
        self.worker.peer_cut_off(peer)
        delay = int(5 * chance(self.worker.scenario.seed, "fence", self.worker.engine, peer, len(self._events)))
        self._network.at(delay, lambda: self._fenced(peer))

    def _fenced(self, peer: str) -> None:
        for read in [read for read in self._open.values() if read.peer == peer]:
            self._end(read, "the connection was cut off")
        self.report(Quiet(peer))

    def forget(self, peer: str) -> None:
        self._met.pop(peer, None)

    def fileno(self) -> int:
        """On the virtual clock nothing waits on descriptors."""
        return -1

    def wait(self, limit_s: float) -> None:
        """The world lets time pass."""

    def close(self) -> None:
        self._closed = True
        self._open.clear()
        self._events.clear()
        self._network.close(self)
