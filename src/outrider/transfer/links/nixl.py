"""The link between processes and machines: control messages over ZMQ, KV through NVIDIA's NIXL.

    engine thread ──commands──▶ ┌─ link thread ────────────────────────────┐ ◀─CURVE─▶ peers
                  ◀──events──── │ sockets · serving agent · agents by peer │ ◀═ cma, tcp ═▶ memory of peers
                                └──────────── desk.answer ─────────────────┘

One thread owns all sockets and agents. It sleeps while nothing is in flight, and polls otherwise: NIXL has nothing to
wait on, and a peer that reads over tcp needs this side to answer.

Reads over tcp that are given up are not ended by destroying their agent: UCX aborts the process of a peer that answers
a read on a connection that was closed meanwhile, as one does that was stopped and goes on. The agent is retired
instead, together with the stage that its bytes arrive in: what still arrives is dropped there, and the agent is
destroyed once nothing is in flight.

Reads are not encrypted, and UCX does not know who
connects: the address must belong to a private network.
"""

from __future__ import annotations

import itertools
import logging
import select
import time
from collections import deque
from collections.abc import Callable
from math import ceil
from threading import Event as Flag
from threading import Thread

import msgspec

from outrider.errors import ConfigError, OutriderError, TransferError
from outrider.transfer.desk import Desk
from outrider.transfer.link import Event, Failed, GroupRead, Landed, Quiet, Received
from outrider.transfer.links.control import IDLE_S, Answer, Complaints, ControlPlane
from outrider.transfer.links.machine import MemoryProbe, ProbedMemory, can_read_memory, checked_address, network_device
from outrider.transfer.links.mailbox import Mailbox
from outrider.transfer.links.memory import MemoryMap, spans
from outrider.transfer.links.nixl_agent import Agent, load_nixl
from outrider.transfer.links.reads import PeerReads
from outrider.transfer.messages import Message, encode
from outrider.transfer.tickets import ClusterKey

READING_SLEEP_S = 0.0001
"""Pause between two looks at reads in flight."""
SERVING_SLEEP_S = 0.0002
"""Pause between two looks at the serving agent while peers are likely to read."""
RETIRED_S = 600.0
"""Longest time for which the agent of reads that were given up is kept, unless RETIRED_MAX others follow it."""
RETIRED_SLEEP_S = 0.01
"""Pause between two looks at reads that were given up."""
RETIRED_MAX = 32
DRAIN_S = 0.3
"""Time in which reads may still end when the link is closed."""
QUIET_SERVING_SLEEP_S = 0.002
"""Pause between two looks while a lease is claimed, but its reader has not been heard of for a while."""
HEARD_S = 2.0
"""Time after a message during which its sender is likely to connect or to read."""
TIDY_INTERVAL_S = 1.0
"""Time between two looks for connections that nothing has used for long."""
IDLE_SLEEP_S = 1.0
"""Longest sleep when nothing happens. UCX then looks after connections that peers have closed."""
ERROR_SLEEP_S = 0.05
CLOSE_LIMIT_S = 10.0
START_LIMIT_S = 60.0
logger = logging.getLogger("outrider.transfer")


class Introduction(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What a reader must know about a worker's memory."""

    engine: str
    metadata: bytes
    """NIXL's description of the serving agent; empty if the worker does not serve."""
    memory: MemoryMap
    probe: MemoryProbe


class _Peer:
    """A peer that was met. Its connection is made by the link's thread, and again after it was lost."""

    def __init__(self, introduction: Introduction, *, with_cma: bool) -> None:
        self.introduction = introduction
        self.with_cma = with_cma
        self.reads: PeerReads | None = None
        self.used_s = time.monotonic()
        """When something was last read from this peer."""


def _has_drained(reads: PeerReads) -> bool:
    """Whether nothing of these reads is in flight any more, because all of it has arrived or the peer is gone."""
    try:
        return reads.drain()
    except Exception:
        return True


class NixlLink:
    """See `transfer.link.Link`. Made and used by one thread, the engine's; only `introduction` is for any thread."""

    def __init__(
        self,
        memory: MemoryMap,
        desk: Desk | None,
        key: ClusterKey,
        *,
        host: str,
        port: int,
        engine: str,
        transport: str = "auto",
    ) -> None:
        """`desk`: answers peers that read from this worker; None if none do. `engine`: an id that is new at each start.
        Raises ConfigError if NIXL is missing or the address cannot be used."""
        memory.check()
        self._memory, self._desk, self._engine, self._transport = memory, desk, engine, transport
        self._nixl = load_nixl()
        address = checked_address(host)
        self._device = network_device(address)
        self._probed = ProbedMemory()
        self._complaints = Complaints()
        self._commands: Mailbox[tuple[Callable[[], None], int | None]] = Mailbox()
        self._events: Mailbox[Event] = Mailbox()
        self._transfers = itertools.count(1)
        self._agents = itertools.count(1)
        self._peers: dict[str, _Peer] = {}
        self._retired: deque[tuple[float, PeerReads]] = deque()
        """Agents of reads that were given up, with the time at which each is destroyed."""
        self._chosen: dict[str, str] = {}
        self._serving: Agent | None = None
        self._heard_s = float("-inf")
        self._tidy_at_s = 0.0
        self._introduction = b""
        self._is_closing = False
        self._death: BaseException | None = None
        self._ready = Flag()
        self._thread = Thread(target=self._run, args=(key, address, port), name="outrider-link", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_LIMIT_S):
            raise TransferError(f"the link has not started within {START_LIMIT_S:.0f} s")
        if self._death is not None:
            self._thread.join()
            if isinstance(self._death, OutriderError):
                raise self._death
            raise ConfigError(f"the nixl link cannot start: {self._death}") from self._death

    # --- the engine's side: nothing here touches a socket or an agent -------------------------------

    @property
    def endpoint(self) -> str:
        return self._control.endpoint

    @property
    def transport(self) -> str:
        chosen = ", ".join(f"{transport} from {peer}" for peer, transport in self._chosen.items())
        return f"nixl ({chosen})" if chosen else "nixl"

    @property
    def complaints(self) -> dict[str, int]:
        """Number of messages and clients that were dropped, by kind."""
        return dict(self._complaints.counts)

    def introduction(self) -> bytes:
        return self._introduction

    def meet(self, peer: str, introduction: bytes) -> None:
        try:
            known = msgspec.msgpack.decode(introduction, type=Introduction)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TransferError(
                f"{peer} introduces itself in an unknown form: {error}; run the same version"
            ) from error
        known.memory.check()
        if not known.metadata or not any(arena.total_bytes for arena in known.memory.arenas):
            raise TransferError(f"{peer} hands no KV over; check its kv_role")
        with_cma = self._transport != "tcp" and can_read_memory(known.probe)
        if self._transport == "cma" and not with_cma:
            raise TransferError(
                f"this process may not read the memory of {peer}, as kv_transport cma demands: run both workers on one "
                "machine as one user, in one container or with ptrace allowed, or choose kv_transport auto"
            )
        self._enqueue(lambda: self._meet(peer, _Peer(known, with_cma=with_cma)))
        self._chosen[peer] = "cma" if with_cma else "tcp"

    def send(self, peer: str, message: Message) -> None:
        frame = encode(message)
        self._enqueue(lambda: self._control.send(peer, frame))

    def read(self, peer: str, read: GroupRead) -> int:
        transfer = next(self._transfers)
        self._enqueue(lambda: self._read(peer, read, transfer), transfer)
        return transfer

    def poll(self) -> list[Event]:
        events = self._events.take()
        if not events:
            self._check_alive()
        return events

    def fence(self, peer: str) -> None:
        self._enqueue(lambda: self._fence(peer))
        self._chosen.pop(peer, None)

    def forget(self, peer: str) -> None:
        self._enqueue(lambda: self._forget(peer))
        self._chosen.pop(peer, None)

    def fileno(self) -> int:
        return self._events.fileno()

    def wait(self, limit_s: float) -> None:
        self._check_alive()
        waiter = select.poll()
        waiter.register(self._events.fileno(), select.POLLIN)
        waiter.poll(ceil(max(0.0, limit_s) * 1e3))

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._commands.put((lambda: None, None))
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            raise TransferError("the link's thread does not end; KV may still arrive: end this process")
        self._commands.close()
        self._events.close()

    def _enqueue(self, command: Callable[[], None], transfer: int | None = None) -> None:
        """`transfer`: the one that fails if the command does."""
        self._check_alive()
        self._commands.put((command, transfer))

    def _check_alive(self) -> None:
        if self._is_closing:
            raise TransferError("the link is closed")
        if self._death is not None:
            raise TransferError(f"the link's thread has ended: {self._death!r}; restart the worker") from self._death

    # --- the link's thread ---------------------------------------------------------------------------

    def _run(self, key: ClusterKey, address: str, port: int) -> None:
        try:
            self._open(key, address, port)
            self._ready.set()
            while not self._is_closing:
                try:
                    self._turn()
                except Exception:
                    logger.exception("transfer link: an error that nothing was prepared for; the link goes on")
                    time.sleep(ERROR_SLEEP_S)
            # The last messages release leases.
            self._obey()
        except BaseException as error:
            self._death = error
            if self._ready.is_set():
                logger.critical("transfer link: its thread ends", exc_info=True)
        finally:
            self._shut()
            self._ready.set()
            self._events.alarm()

    def _open(self, key: ClusterKey, address: str, port: int) -> None:
        self._control = ControlPlane(key, address=address, port=port, complaints=self._complaints)
        self._control.watch(self._commands.fileno())
        if self._desk is not None:
            with_cma = self._transport != "tcp"
            self._serving = Agent(self._nixl, f"{self._engine} serving", device=self._device, with_cma=with_cma)
            self._serving.register(self._memory.arenas)
        introduction = Introduction(
            engine=self._engine,
            metadata=b"" if self._serving is None else self._serving.metadata,
            memory=self._memory,
            probe=self._probed.probe,
        )
        self._introduction = msgspec.msgpack.encode(introduction)

    def _turn(self) -> None:
        """Do what is due, and sleep if that was nothing."""
        self._obey()
        moved = self._receive()
        is_reading = False
        for name, peer in self._peers.items():
            if peer.reads is not None and not peer.reads.is_idle:
                moved |= self._advance(name, peer)
                is_reading = True
        sleep_s = self._serve()
        now_s = time.monotonic()
        if now_s >= self._tidy_at_s:
            self._tidy_at_s = now_s + TIDY_INTERVAL_S
            self._close_idle(now_s)
        if self._retired:
            self._destroy_retired(now_s)
            sleep_s = min(sleep_s, RETIRED_SLEEP_S)
        if not moved:
            self._sleep(min(sleep_s, READING_SLEEP_S) if is_reading else sleep_s)

    def _obey(self) -> None:
        for command, transfer in self._commands.take():
            try:
                command()
            except Exception as error:
                if transfer is None:
                    self._complaints.add("commands that failed", error)
                else:
                    self._events.put(Failed(transfer, str(error)))

    def _sleep(self, sleep_s: float) -> None:
        # ZMQ waits in whole milliseconds.
        if sleep_s < 1e-3:
            time.sleep(sleep_s)
        else:
            self._control.wait(sleep_s)

    def _receive(self) -> bool:
        messages = self._control.receive()
        for message in messages:
            if isinstance(message, Answer):
                self._events.put(Received(message.peer, message.message))
                continue
            if self._desk is None:
                self._complaints.add("questions to a worker that hands nothing over", type(message.message).__name__)
                continue
            self._heard_s = time.monotonic()
            try:
                answer = self._desk.answer(message.message, self.introduction)
                if answer is not None:
                    self._control.answer(message, encode(answer))
            except Exception as error:
                self._complaints.add("questions that could not be answered", repr(error))
        return bool(messages)

    def _serve(self) -> float:
        """Let peers read. Returns how long this can wait until the next time."""
        if self._desk is None or self._serving is None:
            return IDLE_SLEEP_S
        self._serving.progress()
        if time.monotonic() - self._heard_s < HEARD_S:
            return SERVING_SLEEP_S
        return QUIET_SERVING_SLEEP_S if self._desk.leases.num_claimed else IDLE_SLEEP_S

    def _meet(self, name: str, peer: _Peer) -> None:
        self._drop(name, "the peer was met again")
        self._peers[name] = peer
        self._connect(peer)

    def _connect(self, peer: _Peer) -> PeerReads:
        peer.reads = PeerReads(
            self._nixl,
            f"{self._engine} reading {next(self._agents)}",
            device=self._device,
            with_cma=peer.with_cma,
            local=self._memory,
            remote=peer.introduction.memory,
            metadata=peer.introduction.metadata,
        )
        return peer.reads

    def _read(self, name: str, read: GroupRead, transfer: int) -> None:
        peer = self._peers.get(name)
        if peer is None:
            raise TransferError(f"{name} has not been met")
        peer.used_s = time.monotonic()
        copied = spans(peer.introduction.memory, read.remote_group, self._memory, read.group, read.runs)
        (peer.reads or self._connect(peer)).start(transfer, copied)

    def _advance(self, name: str, peer: _Peer) -> bool:
        reason = ""
        try:
            assert peer.reads is not None
            landed, moved = peer.reads.advance()
            for transfer in landed:
                self._events.put(Landed(transfer))
            return moved
        except Exception as error:
            reason = f"reading from {name} failed: {error}"
        # Outside the handler, because the error's traceback refers to handles, and each of them keeps the agent alive.
        # Other chunks may still be on their way: only when nothing calls the agent any more is nothing written.
        self._disconnect(peer, reason)
        return True

    def _disconnect(self, peer: _Peer, reason: str) -> None:
        reads, peer.reads = peer.reads, None
        if reads is None:
            return
        failed = reads.open_transfers
        if reads.is_idle or not reads.is_staged:
            reads.destroy()
        else:
            reads.give_up()
            self._retired.append((time.monotonic() + RETIRED_S, reads))
        for transfer in failed:
            self._events.put(Failed(transfer, reason))

    def _close_idle(self, now_s: float) -> None:
        """Close connections that nothing has used for long. What peers have said about themselves is kept."""
        self._control.close_idle(now_s)
        for peer in self._peers.values():
            if peer.reads is not None and peer.reads.is_idle and now_s - peer.used_s >= IDLE_S:
                self._disconnect(peer, "")

    def _destroy_retired(self, now_s: float) -> None:
        while self._retired and (self._retired[0][0] <= now_s or len(self._retired) > RETIRED_MAX):
            self._retired.popleft()[1].destroy()
        for item in [item for item in self._retired if _has_drained(item[1])]:
            self._retired.remove(item)
            item[1].destroy()

    def _drop(self, name: str, reason: str) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            self._disconnect(peer, reason)
            del self._peers[name]

    def _fence(self, name: str) -> None:
        self._drop(name, f"reading from {name} was given up")
        self._events.put(Quiet(name))

    def _forget(self, name: str) -> None:
        self._drop(name, f"{name} was forgotten")
        self._control.forget(name)

    def _drain(self) -> None:
        """Let reads end that are in flight, so that no peer answers a connection that is closed."""
        end_s = time.monotonic() + DRAIN_S
        while self._retired and time.monotonic() < end_s:
            self._destroy_retired(time.monotonic())
            time.sleep(READING_SLEEP_S)

    def _shut(self) -> None:
        for name in list(self._peers):
            self._drop(name, "the link has ended")
        self._drain()
        while self._retired:
            try:
                self._retired.popleft()[1].destroy()
            except Exception:
                logger.exception("transfer link: an agent does not end, and may go on reading")
        try:
            if self._serving is not None:
                self._serving.destroy()
                self._serving = None
        except Exception:
            logger.exception("transfer link: the serving agent does not end")
        if hasattr(self, "_control"):
            self._control.close()
