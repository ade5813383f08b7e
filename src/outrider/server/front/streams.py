"""Requests that are open in the engine, and what arrives for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from outrider.errors import OutriderError
from outrider.server.messages import Abort, Accepted, Delta, Refused, Submit, ToEngine

Item = Accepted | Refused | Delta | Exception


class Arrival(NamedTuple):
    place: int
    """Which of the job's requests."""
    item: Item


class Sender(Protocol):
    def send(self, message: ToEngine) -> None: ...


class Job:
    """One or several requests to the engine that one client waits for; leaving it ends what still runs."""

    def __init__(self, streams: OpenRequests, orders: Sequence[Submit]) -> None:
        self._streams = streams
        self.orders = orders
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._open: dict[str, int] = {}

    def __enter__(self) -> Job:
        for place, order in enumerate(self.orders):
            self._open[order.request_id] = place
            self._streams.start(order, self)
        self._streams.num_jobs += 1
        return self

    def __exit__(self, *_error: object) -> None:
        for name in self._open:
            self._streams.leave(name)
        self._open.clear()
        self._streams.num_jobs -= 1

    @property
    def finished(self) -> bool:
        return not self._open and self._arrivals.empty()

    async def next(self) -> Arrival:
        return await self._arrivals.get()

    def put_back(self, arrivals: Iterable[Arrival]) -> None:
        """Hand them out again, before everything else."""
        later = [self._arrivals.get_nowait() for _ in range(self._arrivals.qsize())]
        for arrival in (*arrivals, *later):
            self._arrivals.put_nowait(arrival)

    def deliver(self, request_id: str, item: Item) -> None:
        ended = isinstance(item, Refused | Exception) or (isinstance(item, Delta) and item.ending is not None)
        place = self._open.pop(request_id) if ended else self._open[request_id]
        self._arrivals.put_nowait(Arrival(place, item))


class OpenRequests:
    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._jobs: dict[str, Job] = {}
        self._sequences: dict[str, int] = {}
        self.num_jobs = 0
        """Clients that wait for an answer, or have not yet taken all of theirs."""
        self.num_sequences = 0
        """Continuations of all requests that are open."""

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, order: Submit, job: Job) -> None:
        self._sender.send(order)
        self._jobs[order.request_id] = job
        self._sequences[order.request_id] = order.params.n
        self.num_sequences += order.params.n

    def leave(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        if self._forget(request_id) is not None:
            # An engine that is gone has taken the request with it.
            with suppress(OutriderError):
                self._sender.send(Abort(request_id=request_id))

    def _forget(self, request_id: str) -> Job | None:
        self.num_sequences -= self._sequences.pop(request_id, 0)
        return self._jobs.pop(request_id, None)

    def deliver(self, request_id: str, item: Item) -> None:
        """What is for a request that was left meanwhile is dropped."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if not isinstance(item, Accepted) and (not isinstance(item, Delta) or item.ending is not None):
            self._forget(request_id)
        job.deliver(request_id, item)

    def fail_all(self, error: Exception) -> None:
        for request_id in list(self._jobs):
            self.deliver(request_id, error)
