"""The requests of an engine that have not ended, and their sequences, which the scheduler and the runner know too."""

from __future__ import annotations

import time

from outrider.engine.continuation import Continuation
from outrider.engine.request import LiveRequest
from outrider.runner.request import RunningRequest
from outrider.runner.runner import Runner
from outrider.sanitizer import Sanitizer
from outrider.scheduler import Scheduler


class LiveRequests:
    """Either all parts of the engine know a sequence, or none does: starting and ending one goes through here."""

    def __init__(self, scheduler: Scheduler, runner: Runner, sanitizer: Sanitizer | None) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sanitizer = sanitizer
        self.requests: dict[str, LiveRequest] = {}
        self.sequences: dict[str, tuple[LiveRequest, Continuation]] = {}
        """Continuations that have not ended, by sequence id."""

    def enter(self, live: LiveRequest) -> None:
        self.requests[live.id] = live
        self.sequences.update({each.sequence_id: (live, each) for each in live.continuations})

    def start(self, live: LiveRequest, continuation: Continuation, running: RunningRequest) -> None:
        """Have the runner run a continuation, and the outputs show its tokens."""
        record = running.record
        continuation.output.tokens, continuation.output.prompt_len = record.tokens, record.prompt_len
        self._runner.add(running)
        if self._sanitizer is not None:
            self._sanitizer.track(record.id, record.tokens, ("", live.salt))

    def drop(self, sequence_id: str) -> None:
        """Have the scheduler and the runner forget a continuation."""
        self._scheduler.abort(sequence_id)
        self.leave(sequence_id)

    def leave(self, sequence_id: str) -> None:
        """Have everything but the scheduler forget a continuation, which may hold its KV for another worker."""
        self._runner.forget(sequence_id)
        self.sequences.pop(sequence_id, None)
        if self._sanitizer is not None:
            self._sanitizer.forget(sequence_id)

    def drop_all(self, live: LiveRequest) -> None:
        for continuation in live.continuations:
            self.drop(continuation.sequence_id)

    def end_all(self, live: LiveRequest, reason: str) -> None:
        self.drop_all(live)
        for continuation in live.continuations:
            continuation.end(reason)

    def close(self, live: LiveRequest) -> None:
        """Note that all continuations of a request have ended."""
        live.output.finished = True
        live.output.metrics.finished_s = time.monotonic()
        del self.requests[live.id]
