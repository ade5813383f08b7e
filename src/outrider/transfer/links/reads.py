"""Reads from one peer, cut into chunks.

A read over cma is a copy inside the call that starts it, and one over tcp takes as long as the network does. Chunks
keep both short enough that the link's thread answers messages in between.

    read 7   [chunk done][chunk in flight][chunk in flight][waiting][waiting]
    read 8   [waiting]
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from outrider.transfer.links.memory import ArenaMemory, MemoryMap, Spans
from outrider.transfer.links.nixl_agent import Agent

STAGED_CHUNK_BYTES = 4 << 20
"""Over tcp, what arrives in one stage."""
DIRECT_CHUNK_BYTES = 16 << 20
"""Over cma, what one call copies, in about a millisecond; smaller ones spend a fifth of the time between calls."""
CHUNK_SPANS = 512
CHUNKS_IN_FLIGHT = 4
WARM_UP = 0
"""Number of the transfer that warms up a connection; the first read takes tens of milliseconds."""
WARM_UP_BYTES = 64


def chunks(spans: Spans, most_bytes: int) -> Iterator[Spans]:
    """Cut spans into parts of bounded size, in order, and join neighbours that are adjacent on both sides."""
    ends = np.cumsum(spans.lengths)
    start, copied = 0, 0
    while start < len(ends):
        fitting = int(np.searchsorted(ends, np.uint64(copied + most_bytes), side="right"))
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


@dataclass(slots=True, eq=False)
class _Chunk:
    handle: Any
    spans: Spans
    stage: ArenaMemory | None
    """Where its bytes arrive first, if not where they belong."""


@dataclass(slots=True, eq=False)
class _Read:
    transfer: int
    waiting: Iterator[Spans]
    chunks: list[_Chunk] = field(default_factory=list)
    """Parts of the read that are in flight."""
    is_posted: bool = False
    """Whether no chunk waits any more."""


class PeerReads:
    """The reads from one peer, through an agent of its own: ending them ends no others.

    Over tcp, bytes arrive in a stage of the agent's own and are copied to their pages once a chunk is complete. UCX may
    write to memory that it was given for a read as long as the agent exists, even while it is destroyed; so it is never
    given the pages. Over cma, a read is a copy inside the call that starts it, and goes to the pages directly.
    """

    def __init__(
        self, nixl: ModuleType, name: str, *, device: str, with_cma: bool, local: MemoryMap, remote: MemoryMap,
        metadata: bytes,
    ) -> None:  # fmt: skip
        self._agent = Agent(nixl, name, device=device, with_cma=with_cma)
        self.is_staged = not with_cma
        self._memory = [np.zeros(WARM_UP_BYTES, dtype=np.uint8)]
        self._stages: list[ArenaMemory] = []
        if self.is_staged:
            stage_bytes = max(STAGED_CHUNK_BYTES, *(arena.page_bytes for arena in local.arenas))
            self._memory += [np.empty(stage_bytes, dtype=np.uint8) for _ in range(CHUNKS_IN_FLIGHT)]
        scratch, *self._stages = (
            ArenaMemory(base=memory.ctypes.data, page_bytes=len(memory), num_pages=1) for memory in self._memory
        )
        self._agent.register([scratch, *self._stages] if self.is_staged else [scratch, *local.arenas])
        self._remote = self._agent.add_remote(metadata)
        self._reads: deque[_Read] = deque()
        self._is_given_up = False
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
        most_bytes = STAGED_CHUNK_BYTES if self.is_staged else DIRECT_CHUNK_BYTES
        self._reads.append(_Read(transfer, chunks(spans, most_bytes)))

    def advance(self) -> tuple[list[int], bool]:
        """Start at most one chunk. Returns the transfers that have ended with all of their bytes, and whether anything
        has happened. Raises if the connection is lost or a chunk cannot be read."""
        in_flight, moved = 0, False
        for read in self._reads:
            for chunk in [chunk for chunk in read.chunks if self._agent.is_done(chunk.handle)]:
                read.chunks.remove(chunk)
                self._arrive(chunk)
                moved = True
            in_flight += len(read.chunks)
        if in_flight < CHUNKS_IN_FLIGHT:
            moved |= self._start_chunk()
        landed = [read.transfer for read in self._reads if read.is_posted and not read.chunks]
        if landed:
            self._reads = deque(read for read in self._reads if not read.is_posted or read.chunks)
        return [transfer for transfer in landed if transfer != WARM_UP], moved

    def _start_chunk(self) -> bool:
        for read in self._reads:
            if not read.is_posted:
                spans = next(read.waiting, None)
                if spans is None:
                    read.is_posted = True
                else:
                    self._post(read, spans)
                return True
        return False

    def _post(self, read: _Read, spans: Spans) -> None:
        stage, wanted = None, spans
        if self.is_staged:
            stage = self._stages.pop()
            starts = np.uint64(stage.base) + np.cumsum(spans.lengths) - spans.lengths
            wanted = spans._replace(destinations=starts)
        handle, is_done = self._agent.start_read(self._remote, wanted)
        chunk = _Chunk(handle, spans, stage)
        if is_done:
            self._arrive(chunk)
        else:
            read.chunks.append(chunk)

    def _arrive(self, chunk: _Chunk) -> None:
        """Bring the bytes of a chunk to where they belong."""
        if chunk.stage is None or self._is_given_up:
            return
        start = chunk.stage.base
        for destination, length in zip(chunk.spans.destinations.tolist(), chunk.spans.lengths.tolist(), strict=True):
            ctypes.memmove(destination, start, length)
            start += length
        self._stages.append(chunk.stage)

    def give_up(self) -> None:
        """Start nothing more, and drop what still arrives in a stage."""
        self._is_given_up = True
        for read in self._reads:
            read.waiting, read.is_posted = iter(()), True

    def drain(self) -> bool:
        """Returns whether nothing is in flight any more; raises as `advance` does. Called after `give_up`."""
        self.advance()
        return self.is_idle

    def destroy(self) -> None:
        """Destroy the agent. A peer that is about to answer one of its reads may not survive that: see `nixl.py`."""
        # A handle holds its agent. Releasing one whose read goes on fails, which NIXL logs.
        self._reads.clear()
        self._agent.destroy()
