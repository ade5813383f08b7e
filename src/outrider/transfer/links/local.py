"""The link between engines of one process: messages are calls, and bytes are copied by a thread."""

from __future__ import annotations

import ctypes
import os
import select
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Lock

import msgspec

from outrider.errors import ConfigError, TransferError
from outrider.transfer.desk import Desk
from outrider.transfer.link import Event, Failed, GroupRead, Landed, Quiet, Received
from outrider.transfer.links.memory import MemoryMap, Spans, spans
from outrider.transfer.messages import Message, decode, encode

_links: dict[str, LocalLink] = {}
"""The links of this process that are open, by endpoint."""
_links_lock = Lock()


class LocalLink:
    def __init__(self, memory: MemoryMap, desk: Desk | None, *, engine: str) -> None:
        self._memory = memory
        self._desk = desk
        self._endpoint = f"local:{engine}"
        self._peers: dict[str, MemoryMap] = {}
        self._events: deque[Event] = deque()
        self._numbers = count()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._being_read = Lock()
        """Held while a peer copies from this link's memory, which must stay in place meanwhile."""
        self._closed = False
        with _links_lock:
            if self._endpoint in _links:
                raise ConfigError(f"two engines of this process have the id {engine!r}; give each its own")
            _links[self._endpoint] = self

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def transport(self) -> str:
        return "local"

    def introduction(self) -> bytes:
        return msgspec.msgpack.encode(self._memory)

    def meet(self, peer: str, introduction: bytes) -> None:
        try:
            memory = msgspec.msgpack.decode(introduction, type=MemoryMap)
        except msgspec.MsgspecError as error:
            raise TransferError(f"the introduction of {peer} makes no sense: {error}") from error
        with _links_lock:
            other = _links.get(peer)
        # Copies are made without a system that would refuse wrong addresses.
        if other is None or memory != other._memory:
            raise TransferError(f"the introduction of {peer} is not that of an engine in this process")
        self._peers[peer] = memory

    def send(self, peer: str, message: Message) -> None:
        with _links_lock:
            other = _links.get(peer)
        if other is None or other._desk is None:
            return
        # Through the encoding, as between processes.
        answer = other._desk.answer(decode(encode(message)), other.introduction)
        if answer is not None:
            self._report(Received(peer, decode(encode(answer))))

    def read(self, peer: str, read: GroupRead) -> int:
        memory = self._peers.get(peer)
        if memory is None:
            raise TransferError(f"{peer} is not connected")
        wanted = spans(memory, read.remote_group, self._memory, read.group, read.runs)
        number = next(self._numbers)
        self._copier.submit(self._copy, peer, number, wanted)
        return number

    def _copy(self, peer: str, number: int, wanted: Spans) -> None:
        with _links_lock:
            source = _links.get(peer)
        if source is None:
            self._report(Failed(number, "the prefill worker is gone"))
            return
        with source._being_read:
            if source._closed:
                self._report(Failed(number, "the prefill worker is gone"))
                return
            rows = zip(wanted.destinations.tolist(), wanted.sources.tolist(), wanted.lengths.tolist(), strict=True)
            for here, there, length in rows:
                ctypes.memmove(here, there, length)
        self._report(Landed(number))

    def poll(self) -> list[Event]:
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            return []
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _report(self, event: Event) -> None:
        self._events.append(event)
        if not self._closed:
            os.eventfd_write(self._ready, 1)

    def fence(self, peer: str) -> None:
        # Copies run one after another, and each of them ends.
        self._peers.pop(peer, None)
        self._copier.submit(self._report, Quiet(peer))

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def fileno(self) -> int:
        return self._ready

    def wait(self, limit_s: float) -> None:
        select.select([self._ready], [], [], limit_s)

    def close(self) -> None:
        if self._closed:
            return
        with _links_lock:
            _links.pop(self._endpoint, None)
        self._copier.shutdown(wait=True)
        with self._being_read:
            self._closed = True
        os.close(self._ready)
