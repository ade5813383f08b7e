"""The loop of the engine process: take orders, run a step, send a report.

A step never waits for the front end: reports are queued by ZMQ without limit, and their size is bounded by
what the running requests may still generate.
"""

from __future__ import annotations

import logging
import time

import zmq

from outrider.engine.engine import Engine
from outrider.errors import NotNowError, RequestError
from outrider.server.engine_process.deltas import RequestReporter
from outrider.server.engine_process.facts import (
    RecentHits,
    counters_of,
    facts_of,
    pages_of,
    speculation_of,
    transfers_of,
)
from outrider.server.messages import (
    Abort,
    Accepted,
    CacheWasReset,
    Counters,
    Delta,
    LookAtPages,
    LookAtSpeculation,
    LookAtTransfers,
    Ping,
    Pong,
    Ready,
    Refused,
    ResetCache,
    StepReport,
    Stop,
    Submit,
    ToFront,
    decode_to_engine,
    encode,
)

logger = logging.getLogger("outrider.engine")

REPORT_INTERVAL_S = 0.25
"""How often figures are sent at least while there is work, even if no client waits for text."""
FAILED_STEPS_MAX = 3
"""Number of steps in a row that may raise before the process gives up, to be replaced by a new one."""


class EngineLoop:
    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._reporters: dict[str, RequestReporter] = {}
        self._hits = RecentHits()
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._aborted = 0
        self._gaps_s: list[float] = []
        self._reported_s = 0.0
        self._counters = Counters()
        """Figures that were reported last."""
        self._stopped = False
        self._failed_steps = 0

    def run(self) -> None:
        self._send(Ready(facts=facts_of(self._engine)))
        while not self._stopped:
            self._take_orders(wait=self._engine.waits or not self._engine.has_work)
            if self._engine.has_work:
                self._step()
            else:
                self._tend()
        self._engine.close()

    def _send(self, message: ToFront) -> None:
        self._socket.send(encode(message))

    # ---- orders ------------------------------------------------------------------------------------

    def _take_orders(self, *, wait: bool) -> None:
        """Take all orders that have arrived; with `wait`, sleep until there is one, or KV has moved."""
        taken = False
        if wait:
            self._sleep()
        while not self._stopped and self._socket.poll(0, zmq.POLLIN):
            self._obey(self._socket.recv())
            taken = True
        if taken and not self._engine.has_work:
            # No step will report the new figures.
            self._report([])

    def _sleep(self) -> None:
        """Wait for an order, for another worker, or for the time at which one of them has taken too long."""
        transfers = self._engine.transfers
        if transfers is None:
            self._socket.poll(None, zmq.POLLIN)
            return
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for descriptor in transfers.files:
            poller.register(descriptor, zmq.POLLIN)
        limit_s = transfers.limit_s
        poller.poll(None if limit_s is None else int(1000 * limit_s) + 1)
        transfers.woken()

    def _obey(self, frame: bytes) -> None:
        match decode_to_engine(frame):
            case Submit() as order:
                self._add(order)
            case Abort(request_id=name):
                if self._reporters.pop(name, None) is not None:
                    self._engine.abort(name)
                    self._aborted += 1
            case ResetCache(call=call):
                self._engine.reset_prefix_cache()
                self._send(CacheWasReset(call=call))
            case LookAtPages(call=call):
                self._send(pages_of(self._engine, call, self._hits))
            case LookAtTransfers(call=call):
                self._send(transfers_of(self._engine, call))
            case LookAtSpeculation(call=call):
                self._send(speculation_of(self._engine, call))
            case Ping():
                steps = self._engine.scheduler.kv.pool.last_completed + 1
                self._send(Pong(steps=steps, has_work=self._engine.has_work))
            case Stop():
                self._stopped = True

    def _add(self, order: Submit) -> None:
        name = order.request_id
        try:
            self._engine.add_request(
                name,
                order.prompt_token_ids,
                order.params,
                priority=order.priority,
                salt=order.salt,
                speculate=order.speculate,
                num_speculative_tokens=order.num_speculative_tokens,
                hand_over=order.hand_over,
                ticket=order.ticket,
                compute_prompt=order.compute_prompt,
            )
        except Exception as error:
            # Whatever is wrong with this request, others are not affected.
            self._refuse(order, error)
        else:
            self._reporters[name] = RequestReporter(
                self._engine.output(name), arrival_s=order.arrival_s, stream=order.stream, tenant=order.tenant
            )
            self._prompt_tokens += len(order.prompt_token_ids)
            self._send(Accepted(request_id=name))

    def _refuse(self, order: Submit, error: BaseException) -> None:
        name, ours = order.request_id, not isinstance(error, RequestError)
        if ours:
            logger.error("request %s could not be started", name, exc_info=error)
        message = f"{type(error).__name__}: {error}" if ours else str(error)
        is_for_now = isinstance(error, NotNowError)
        self._send(Refused(request_id=name, message=message, is_engine_fault=ours, is_for_now=is_for_now))

    # ---- steps -------------------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            changed = [output.request_id for output in self._engine.step()]
            self._failed_steps = 0
        except Exception:
            self._failed_steps += 1
            logger.exception("a step failed; its requests end with an error")
            if self._failed_steps >= FAILED_STEPS_MAX:
                raise
            # The requests of the step have ended.
            changed = [name for name, reporter in self._reporters.items() if reporter.output.finished]
        now = time.monotonic()
        deltas = []
        for name in changed:
            reporter = self._reporters[name]
            self._note(reporter, now)
            deltas += reporter.deltas()
            if reporter.output.finished:
                del self._reporters[name]
        if deltas or now - self._reported_s > REPORT_INTERVAL_S:
            self._report(deltas, now)

    def _note(self, reporter: RequestReporter, now: float) -> None:
        if not reporter.hit_noted and reporter.output.metrics.scheduled_s is not None:
            reporter.hit_noted = True
            self._hits.note(reporter.tenant, reporter.output.prompt_len, reporter.output.metrics.cached_tokens)
        new = reporter.count_new_tokens()
        if not new:
            return
        self._generated_tokens += new
        if reporter.last_tokens_s is not None:
            self._gaps_s.append(now - reporter.last_tokens_s)
        reporter.last_tokens_s = now

    def _tend(self) -> None:
        """Let KV go that is not held for other workers any more, and tell the front end, which may wait for it."""
        self._engine.tend()
        now, reported = self._engine.transfer_counters(), self._counters
        if (now.leases, now.held_pages) != (reported.leases, reported.held_pages):
            self._report([])

    def _report(self, deltas: list[Delta], now: float | None = None) -> None:
        gaps, self._gaps_s = self._gaps_s, []
        self._reported_s = time.monotonic() if now is None else now
        self._counters = counters_of(
            self._engine,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            aborted=self._aborted,
        )
        self._send(StepReport(deltas=deltas, counters=self._counters, gaps_s=gaps))
