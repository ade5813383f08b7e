"""Copies between pages of the device and the host's memory, for devices whose memory is the host's: one thread, which
also computes and compares trailers."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import NamedTuple

from outrider.transfer.tier import TierPage
from outrider.transfer.tiers.host import CopyEnded
from outrider.transfer.tiers.sealing import Sealer


@dataclass(frozen=True, slots=True)
class PageAddresses:
    """Where the pages of every group lie in this process. A page is in one piece."""

    bases: tuple[int, ...]
    """Address of page 0, per group."""
    strides: tuple[int, ...]
    """Distance between two pages, per group."""
    page_bytes: tuple[int, ...]
    owner: object = None
    """What must not be freed while pages are copied."""

    def address(self, page: TierPage) -> int:
        return self.bases[page.group] + self.strides[page.group] * page.page


class HostValue(NamedTuple):
    data: bytearray
    trailer: bytes


class _Job(NamedTuple):
    number: int
    pages: Sequence[TierPage]
    values: Sequence[HostValue] | None
    """What to copy to the pages; None where pages are copied out."""


class MemoryCopier:
    """A `PageCopier` for memory that this process can address."""

    def __init__(self, addresses: PageAddresses, sealer: Sealer) -> None:
        self._addresses = addresses
        self._sealer = sealer
        self._ins: deque[_Job] = deque()
        self._outs: deque[_Job] = deque()
        self._spare: dict[int, list[bytearray]] = {}
        """Buffers to use again, by size: new ones cost a page fault for every 4 KiB."""
        self._ended: deque[CopyEnded] = deque()
        self._wanted = Condition()
        self._closed = False
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = Thread(target=self._run, name="kv-offload", daemon=True)
        self._thread.start()

    def copy_out(self, number: int, pages: Sequence[TierPage]) -> None:
        self._submit(self._outs, _Job(number, pages, None))

    def copy_in(self, number: int, pages: Sequence[TierPage], values: Sequence[HostValue]) -> None:
        self._submit(self._ins, _Job(number, pages, values))

    def _submit(self, jobs: deque[_Job], job: _Job) -> None:
        with self._wanted:
            jobs.append(job)
            self._wanted.notify()

    def recycle(self, value: HostValue) -> None:
        self._spare.setdefault(len(value.data), []).append(value.data)

    def wake(self) -> None:
        os.eventfd_write(self._ready, 1)

    def poll(self) -> list[CopyEnded]:
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            return []
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def fileno(self) -> int:
        return self._ready

    def close(self) -> None:
        if self._closed:
            return
        with self._wanted:
            self._closed = True
            self._wanted.notify()
        self._thread.join()
        os.close(self._ready)

    # ---- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wanted:
                while not (self._ins or self._outs or self._closed):
                    self._wanted.wait()
                if self._closed:
                    return
                job = self._ins.popleft() if self._ins else self._outs.popleft()
            self._do(job)

    def _do(self, job: _Job) -> None:
        if job.values is not None:
            self._report(job.number, [self._load(*each) for each in zip(job.pages, job.values, strict=True)])
            return
        values = []
        for page in job.pages:
            # A request waits for what comes in, and none for what goes out.
            while self._ins and not self._closed:
                self._do(self._ins.popleft())
            values.append(None if self._closed else self._save(page))
        self._report(job.number, values)

    def _report(self, number: int, values: list[HostValue | None] | list[bool]) -> None:
        self._ended.append(CopyEnded(number, values))
        if not self._closed:
            os.eventfd_write(self._ready, 1)

    def _save(self, page: TierPage) -> HostValue | None:
        size = self._addresses.page_bytes[page.group]
        spare = self._spare.get(size)
        if not spare:
            # Buffers of other sizes are let go, or the budget would not bound what is held.
            self._spare.clear()
        try:
            data = spare.pop() if spare else bytearray(size)
        except MemoryError:
            return None
        buffer = (ctypes.c_char * size).from_buffer(data)
        ctypes.memmove(buffer, self._addresses.address(page), size)
        return HostValue(data, self._sealer.trailer(page.key, data))

    def _load(self, page: TierPage, value: HostValue) -> bool:
        if not self._sealer.is_intact(page.key, value.data, value.trailer):
            return False
        size = len(value.data)
        buffer = (ctypes.c_char * size).from_buffer(value.data)
        ctypes.memmove(self._addresses.address(page), buffer, size)
        return True
