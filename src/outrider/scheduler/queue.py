"""Waiting requests and running requests, by rank. Planning a step never scans the waiting ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from outrider.scheduler.request import Request

Rank = tuple[bool, int, int]


class WaitingQueue:
    """A heap. Entries of requests that no longer wait are dropped when they come up, or when they are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Request]] = []
        self._pushes = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, request: Request) -> None:
        self._pushes += 1
        self._live += 1
        request.queue_entry = self._pushes
        heappush(self._heap, (request.rank, self._pushes, request))

    def peek(self) -> Request | None:
        """Returns the request that ranks first, and leaves it in the queue."""
        while self._heap:
            _rank, entry, request = self._heap[0]
            if request.queue_entry == entry:
                return request
            heappop(self._heap)
        return None

    def forget(self, request: Request) -> None:
        """Take out a request that no longer waits."""
        request.queue_entry = 0
        self._live -= 1
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [item for item in self._heap if item[2].queue_entry == item[1]]
            heapify(self._heap)


class RunningList:
    """Requests sorted by rank."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def snapshot(self) -> list[Request]:
        return self._requests.copy()

    def add(self, request: Request) -> None:
        rank = request.rank
        place = bisect_left(self._ranks, rank)
        self._ranks.insert(place, rank)
        self._requests.insert(place, request)

    def remove(self, request: Request) -> None:
        place = bisect_left(self._ranks, request.rank)
        assert self._requests[place] is request
        del self._ranks[place]
        del self._requests[place]

    def last(self) -> Request | None:
        return self._requests[-1] if self._requests else None
