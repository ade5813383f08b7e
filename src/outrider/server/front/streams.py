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
    """Index of the order in its job."""
    item: Item

    @property
    def is_last(self) -> bool:
        """Whether nothing else arrives for the same order."""
        if isinstance(self.item, Delta):
            return self.item.ending is not None
        return not isinstance(self.item, Accepted)


class Sender(Protocol):
    def send(self, message: ToEngine) -> None: ...


class Job:
    """The requests to the engine that one client waits for; leaving the context aborts those that still run."""

    def __init__(self, requests: OpenRequests, orders: Sequence[Submit]) -> None:
        self._requests = requests
        self.orders = orders
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._num_running = len(orders)

    def __enter__(self) -> Job:
        for place, order in enumerate(self.orders):
            self._requests.start(OpenRequest(self, place, order))
        self._requests.num_jobs += 1
        return self

    def __exit__(self, *_error: object) -> None:
        for order in self.orders:
            self._requests.abort(order.request_id)
        self._requests.num_jobs -= 1

    @property
    def finished(self) -> bool:
        return not self._num_running and self._arrivals.empty()

    async def next(self) -> Arrival:
        return await self._arrivals.get()

    def put_back(self, arrivals: Iterable[Arrival]) -> None:
        """Puts arrivals in front of all others, so that `next` returns them again."""
        later = [self._arrivals.get_nowait() for _ in range(self._arrivals.qsize())]
        for arrival in (*arrivals, *later):
            self._arrivals.put_nowait(arrival)

    def deliver(self, arrival: Arrival) -> None:
        self._num_running -= arrival.is_last
        self._arrivals.put_nowait(arrival)


class OpenRequest(NamedTuple):
    job: Job
    place: int
    """Index of the order in its job."""
    order: Submit


class OpenRequests:
    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._open: dict[str, OpenRequest] = {}
        self.num_jobs = 0
        """Number of clients that wait for an answer, or have not yet received all of theirs."""
        self.num_sequences = 0
        """Number of continuations of all open requests."""

    def __len__(self) -> int:
        return len(self._open)

    def start(self, request: OpenRequest) -> None:
        order = request.order
        self._sender.send(order)
        self._open[order.request_id] = request
        self.num_sequences += order.params.n

    def abort(self, request_id: str) -> None:
        """Ends a request whose client no longer waits; does nothing if it has ended already."""
        if request_id not in self._open:
            return
        self._close(request_id)
        # An engine that is gone has taken the request with it.
        with suppress(OutriderError):
            self._sender.send(Abort(request_id=request_id))

    def _close(self, request_id: str) -> None:
        self.num_sequences -= self._open.pop(request_id).order.params.n

    def deliver(self, request_id: str, item: Item) -> None:
        """Hands an item to the job of its request; items for requests that were aborted are dropped."""
        request = self._open.get(request_id)
        if request is None:
            return
        arrival = Arrival(request.place, item)
        if arrival.is_last:
            self._close(request_id)
        request.job.deliver(arrival)

    def fail_all(self, error: Exception) -> None:
        for request_id in list(self._open):
            self.deliver(request_id, error)
