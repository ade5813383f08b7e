"""Bare calls to NIXL, which carries KV between workers: what a hand-off over it is compared with.

One agent in each process, all spans of a prompt in one request, and a reader that does nothing but ask whether they
have come. There are no chunks, no messages and no thread in between, and nothing could stop such a read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from outrider.errors import TransferError
from outrider.transfer.links.memory import MemoryMap, Spans
from outrider.transfer.links.nixl_agent import Agent, load_nixl

LIMIT_S = 60.0
DEVICE = "lo"


class BareServer:
    """The side that is read from."""

    def __init__(self, memory: MemoryMap) -> None:
        self.memory = memory
        # Where cma is not allowed, the same agent is read over tcp.
        self._agent = Agent(load_nixl(), "bare server", device=DEVICE, with_cma=True)
        self._agent.register(memory.arenas)

    @property
    def metadata(self) -> bytes:
        return self._agent.metadata

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Do what readers wait for, until it is over."""
        while not is_over():
            self._agent.progress()

    def close(self) -> None:
        self._agent.destroy()


class BareReader:
    def __init__(self, memory: MemoryMap, *, remote: MemoryMap, metadata: bytes, with_cma: bool) -> None:
        """`remote` and `metadata` describe the server."""
        self.remote = remote
        self._agent = Agent(load_nixl(), f"bare reader, cma {with_cma}", device=DEVICE, with_cma=with_cma)
        self._agent.register(memory.arenas)
        self._name = self._agent.add_remote(metadata)

    def read(self, wanted: Spans) -> float:
        """Returns the seconds that it takes to read these bytes. The server must serve meanwhile."""
        started = perf_counter()
        handle, is_done = self._agent.start_read(self._name, wanted)
        while not is_done:
            is_done = self._agent.is_done(handle)
            if perf_counter() - started > LIMIT_S:
                raise TransferError(
                    f"a bare read has not ended within {LIMIT_S:.0f} s; the other process may be stopped"
                )
        return perf_counter() - started

    def close(self) -> None:
        self._agent.destroy()
