"""Reads from one peer, cut into chunks.

A read over cma is a copy inside the call that starts it, and one over tcp takes as long as the network does. Chunks
keep both short enough that the link's thread answers messages in between.

    read 7   [chunk done][chunk in flight][chunk in flight][waiting][waiting]
    read 8   [waiting]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from outrider.transfer.links.memory import ArenaMemory, MemoryMap, Spans
from outrider.transfer.links.nixl_agent import Agent

CHUNK_BYTES = 4 << 20
CHUNK_SPANS = 512
CHUNKS_IN_FLIGHT = 4
WARM_UP = 0
"""Number of the transfer that warms up a connection; the first read takes tens of milliseconds."""
WARM_UP_BYTES = 64


def chunks(spans: Spans) -> Iterator[Spans]:
    """Cut spans into parts of bounded size, in order, and join neighbours that are adjacent on both sides."""
    ends = np.cumsum(spans.lengths)
    start, copied = 0, 0
    while start < len(ends):
        fitting = int(np.searchsorted(ends, np.uint64(copied + CHUNK_BYTES), side="right"))
        end = max(start + 1, min(fitting, start + CHUNK_SPANS))
        yield _joined(Spans(*(column[start:end] for column in spans)))
        start, copied = end, int(ends[end - 1])


def _joined(spans: Spans) -> Spans:
    sources, destinations, lengths = spans
    adjacent = (sources[1:] == sources[:-1] + lengths[:-1]) & (destinations[1:] == destinations[:-1] + lengths[:-1])
    if not adjacent.any():
        return spans
    firsts = np.flatnonzero(np.concatenate([[True], ~adjacent]))
    return Spans(sources[firsts], destinations[firsts], np.add.reduceat(lengths, firsts))


@dataclass(slots=True)
class _Read:
    transfer: int
    waiting: Iterator[Spans]
    handles: list[Any] = field(default_factory=list)
    is_posted: bool = False
    """Whether no chunk waits any more."""


class PeerReads:
    """The reads from one peer, through an agent of its own: destroying it ends these reads and no others."""

    def __init__(
        self, nixl: ModuleType, name: str, *, device: str, with_cma: bool, local: MemoryMap, remote: MemoryMap,
        metadata: bytes,
    ) -> None:  # fmt: skip
        self._agent = Agent(nixl, name, device=device, with_cma=with_cma)
        self._scratch = np.zeros(WARM_UP_BYTES, dtype=np.uint8)
        scratch = ArenaMemory(base=self._scratch.ctypes.data, page_bytes=WARM_UP_BYTES, num_pages=1)
        self._agent.register([*local.arenas, scratch])
        self._remote = self._agent.add_remote(metadata)
        self._reads: deque[_Read] = deque()
        length = min(WARM_UP_BYTES, max(arena.total_bytes for arena in remote.arenas))
        source = next(arena.base for arena in remote.arenas if arena.total_bytes >= length)
        self.start(WARM_UP, Spans(*(np.array([value], dtype=np.uint64) for value in (source, scratch.base, length))))

    @property
    def open_transfers(self) -> list[int]:
        """Numbers of the transfers that have not ended."""
        return [read.transfer for read in self._reads if read.transfer != WARM_UP]

    @property
    def is_idle(self) -> bool:
        return not self._reads

    def start(self, transfer: int, spans: Spans) -> None:
        self._reads.append(_Read(transfer, chunks(spans)))

    def advance(self) -> tuple[list[int], bool]:
        """Start at most one chunk. Returns the transfers that have ended with all of their bytes, and whether anything
        has happened. Raises if the connection is lost or a chunk cannot be read."""
        in_flight, moved = 0, False
        for read in self._reads:
            still = [handle for handle in read.handles if not self._agent.is_done(handle)]
            moved |= len(still) < len(read.handles)
            read.handles = still
            in_flight += len(still)
        if in_flight < CHUNKS_IN_FLIGHT:
            moved |= self._start_chunk()
        landed = [read.transfer for read in self._reads if read.is_posted and not read.handles]
        if landed:
            self._reads = deque(read for read in self._reads if not read.is_posted or read.handles)
        return [transfer for transfer in landed if transfer != WARM_UP], moved

    def _start_chunk(self) -> bool:
        for read in self._reads:
            if not read.is_posted:
                spans = next(read.waiting, None)
                if spans is None:
                    read.is_posted = True
                else:
                    handle, is_done = self._agent.start_read(self._remote, spans)
                    if not is_done:
                        read.handles.append(handle)
                return True
        return False

    def destroy(self) -> list[int]:
        """End all reads; nothing is written after this returns. Returns the transfers that had not ended."""
        transfers = self.open_transfers
        # A handle holds its agent. Releasing one whose read goes on fails, which NIXL logs.
        self._reads.clear()
        self._agent.destroy()
        return transfers
