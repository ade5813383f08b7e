"""Requests that wait, load and run; and the moves between these states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from typing import NamedTuple

from outrider.kv.manager import KVManager
from outrider.scheduler.queue import RunningList, WaitingQueue
from outrider.scheduler.request import Request, State

QuarantinedPages = list[tuple[int, list[int]]]
"""(group, pages) that a transfer in flight may still write to: `KVManager.restore_quarantined` gives them back."""


class GivenUp(NamedTuple):
    """A sequence that ended, or lost its KV, while a transfer may have been using its pages."""

    sequence_id: str
    quarantined: QuarantinedPages
    """Pages that its own loads may still write to."""


class Roster:
    """Keeps a request's state, the list it is on, and its KV in step."""

    def __init__(self, kv: KVManager, *, protect_after: int) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.prefilling = RunningList()
        self.decoding = RunningList()
        self.fetching: dict[str, Request] = {}
        """Requests whose peer has not answered yet."""
        self.loading: dict[str, Request] = {}
        self.given_up: list[GivenUp] = []
        self.num_preemptions = 0
        self._kv = kv
        self._protect_after = protect_after

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def enter(self, request: Request) -> None:
        """Take in a request, whose state says whether it waits or is being fetched."""
        self.requests[request.id] = request
        if request.state is State.FETCHING:
            self.fetching[request.id] = request
        else:
            self.waiting.push(request)

    def leave(self, request: Request) -> None:
        """Take the request off the list of its state. The caller gives it its next state."""
        if request.state is State.WAITING:
            self.waiting.forget(request)
        elif request.state is State.FETCHING:
            self.fetching.pop(request.id, None)  # it is gone already once the answer is here
        elif request.state is State.LOADING:
            del self.loading[request.id]
        elif request.state is State.PREFILLING:
            self.prefilling.remove(request)
        elif request.state is State.DECODING:
            self.decoding.remove(request)

    def wait(self, request: Request) -> None:
        self.leave(request)
        request.state = State.WAITING
        self.waiting.push(request)

    def load(self, request: Request) -> None:
        self.leave(request)
        request.state = State.LOADING
        self.loading[request.id] = request

    def prefill(self, request: Request) -> None:
        self.leave(request)
        request.state = State.PREFILLING
        self.prefilling.add(request)

    def decode(self, request: Request) -> None:
        self.leave(request)
        request.state = State.DECODING
        self.decoding.add(request)

    def hold(self, request: Request) -> None:
        """Keep a request that is done on this worker until a peer has fetched it."""
        self.leave(request)
        request.state = State.HELD

    def finish(self, request: Request, *, keep_end: bool = True) -> QuarantinedPages:
        """Forget the request. Returns the pages that a transfer in flight may still write to.

        Without `keep_end` the end of its text is not published: it is unknown what its last step wrote.
        """
        quarantined = self._kv.abandon_loading(request.kv) if request.state is State.LOADING else []
        self.leave(request)
        request.state = State.FINISHED
        self._kv.close(request.kv, keep_end=keep_end)
        del self.requests[request.id]
        return quarantined

    def give_up(self, request: Request, *, keep_end: bool = True) -> None:
        """Forget a request that has not come to its end."""
        in_transfer = request.in_transfer
        quarantined = self.finish(request, keep_end=keep_end)
        if in_transfer:
            self.note_given_up(request, quarantined)

    def note_given_up(self, request: Request, pages: QuarantinedPages) -> None:
        """Note for the transfer driver that a request ended or lost its loads, and which pages were quarantined."""
        self.given_up.append(GivenUp(request.id, pages))

    def start_over(self, kept: Iterable[Request]) -> None:
        """Keep only these requests, which wait or are being fetched; the caller has taken their KV."""
        self.waiting, self.prefilling, self.decoding = WaitingQueue(), RunningList(), RunningList()
        self.fetching, self.loading, self.requests = {}, {}, {}
        for request in kept:
            request.epoch += 1
            request.drafts = request.proposed = 0
            request.fresh, request.stalled = True, False
            request.flight.clear()
            if request.state is not State.FETCHING:
                request.state = State.WAITING
            self.enter(request)

    def running_from_last(self) -> Iterator[Request]:
        """Returns the running requests, the last-ranked first."""
        return merge(
            reversed(self.prefilling.snapshot()), reversed(self.decoding.snapshot()), key=lambda r: r.rank, reverse=True
        )

    def last_running(self) -> Request | None:
        """Returns the running request that ranks last."""
        candidates = [c for c in (self.decoding.last(), self.prefilling.last()) if c is not None]
        return max(candidates, key=lambda c: c.rank, default=None)

    def preempt(self, victim: Request, *, keep_end: bool = True) -> None:
        """Have a request computed again later. After a few preemptions it is protected: it then goes before all
        unprotected requests."""
        self.leave(victim)
        self._kv.release(victim.kv, keep_end=keep_end)
        victim.epoch += 1
        victim.preemptions += 1
        victim.drafts = victim.proposed = 0
        victim.fresh, victim.stalled = True, False
        victim.protected = victim.preemptions >= self._protect_after
        victim.state = State.WAITING
        self.waiting.push(victim)
        self.num_preemptions += 1
