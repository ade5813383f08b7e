"""One request's way through the workers: the prompt to a prefill worker, the rest to a decode worker.

Until the client has received a byte, a worker that fails is replaced by another one: another prefill worker, then a
decode worker without KV, then another decode worker. After that a failure ends the stream with an error event, because
another worker would begin the answer anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import msgspec

from outrider.proxy import bodies
from outrider.proxy.bodies import Fields
from outrider.proxy.client import Answer, Call, UpstreamError
from outrider.proxy.config import ProxyConfig
from outrider.proxy.events import error_events, whole_events
from outrider.proxy.metrics import ProxyMetrics
from outrider.proxy.workers import Role, Worker, Workers
from outrider.server.front.problems import Problem, unavailable

logger = logging.getLogger("outrider.proxy")

RESENT_STATUSES = (429, 500, 502, 503)
"""Answers that say nothing about the request, so that another worker may serve it."""
DECODE_ATTEMPTS_MAX = 3
"""The number of decode workers that one request is sent to at most, so that a request that ends workers cannot end all
of them."""
KV_MISSING = "kv_transfer_missing"
"""The code of a decode worker that computes no prompts, and got one without KV."""
REASON_CHARACTERS_MAX = 300


@dataclass(kw_only=True)
class Opened:
    """The answer of a worker, of which the client has not seen anything yet."""

    worker: Worker
    answer: Answer
    body: bytes = b""
    """The whole answer, or the first events of a stream."""
    events: AsyncGenerator[bytes, None] | None = None
    """The further events of a stream."""
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What keeps a stream open; empty for a whole answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What came of sending a prompt to prefill workers: neither of these if none of them served."""

    handed: msgspec.Raw | None = None
    """What a prefill worker tells the decode worker."""
    refusal: Opened | None = None
    """The answer of a prefill worker that refused the request. A decode worker refuses a wrong request too, in words
    that fit what the client sent; this is for clients of decode workers that do not look at requests without KV."""


class Forwarding:
    def __init__(self, config: ProxyConfig, workers: Workers, metrics: ProxyMetrics) -> None:
        self._config = config
        self._workers = workers
        self._metrics = metrics
        self._ending: Problem | None = None

    def end_all(self, problem: Problem) -> None:
        """End every open request with this problem."""
        self._ending = problem
        for worker in self._workers.all:
            worker.cut_off()

    async def open(self, path: str, call: Call) -> Opened:
        """Returns a worker's answer to a client's request, or raises a Problem."""
        fields = bodies.fields_of(call.body) if path in bodies.LENGTH_FIELDS else None
        try:
            async with asyncio.timeout(self._config.request_limit_s):
                return await self._open(path, call, fields)
        except TimeoutError:
            raise self._too_slow() from None

    async def stream(self, path: str, opened: Opened, *, deadline_s: float) -> AsyncGenerator[bytes, None]:
        """Yields the events of an answer; the last one is an error if they do not come to their end."""
        assert opened.events is not None
        yield opened.body
        try:
            while True:
                # A time limit must not stay open while the client reads.
                async with asyncio.timeout_at(deadline_s):
                    events = await anext(opened.events, None)
                if events is None:
                    return
                yield events
        except TimeoutError:
            yield error_events(path, self._too_slow())
        except UpstreamError as problem:
            self._metrics.stream_lost()
            logger.warning("a stream of the %s broke off: %s", opened.worker, problem)
            yield error_events(path, self._ending or worker_lost())

    async def _open(self, path: str, call: Call, fields: Fields | None) -> Opened:
        tried: set[Worker] = set()
        refusal: Opened | None = None
        prompt, is_unclaimed = Prompt(), False
        while len(tried) < DECODE_ATTEMPTS_MAX and self._workers.choose(Role.DECODE, tried) is not None:
            if fields is not None and not is_unclaimed and prompt.refusal is None:
                prompt, is_unclaimed = await self._hand_over(path, call, fields), True
            # Computing the prompt has taken time, in which the workers may have changed.
            worker = self._workers.choose(Role.DECODE, tried)
            if worker is None:
                break
            tried.add(worker)
            try:
                opened = await self._ask(
                    worker,
                    call if fields is None or prompt.handed is None else _with(call, fields, prompt.handed),
                )
            except UpstreamError as problem:
                self._failed(worker, str(problem))
                # A worker that has seen the request may have claimed the KV; the next one needs a hand-off of its own.
                is_unclaimed = not problem.was_sent
                continue
            if opened.answer.status not in RESENT_STATUSES:
                if bodies.error_code(opened.body) != KV_MISSING:
                    return opened
                if prompt.refusal is not None:
                    return prompt.refusal
                raise _no_prefill_worker()
            self._failed(worker, _said(opened))
            refusal, is_unclaimed = opened, False
        if refusal is not None:
            return refusal
        raise self._no_decode_worker()

    # ---- prompts -----------------------------------------------------------------------------------

    async def _hand_over(self, path: str, call: Call, fields: Fields) -> Prompt:
        """Has a prefill worker compute the prompt."""
        skipped = bodies.reason_to_skip(path, fields, characters_min=self._config.prompt_characters_min)
        if skipped is not None:
            self._metrics.hand_off(f"skipped_{skipped.value}")
            return Prompt()
        order = replace(call, body=bodies.for_prefill(path, fields))
        tried: set[Worker] = set()
        while (worker := self._workers.choose(Role.PREFILL, tried)) is not None:
            tried.add(worker)
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(self._config.prefill_limit_s):
                    opened = await self._ask(worker, order)
                    # A stream, which was not asked for, is not read.
                    await opened.held.aclose()
            except (UpstreamError, TimeoutError) as problem:
                self._failed(worker, str(problem) or f"no answer within {self._config.prefill_limit_s:g} s")
                continue
            if opened.answer.status in RESENT_STATUSES or opened.answer.status >= 500:
                self._failed(worker, _said(opened))
                continue
            return self._handed(opened, time.monotonic() - began_s)
        self._metrics.hand_off("no_prefill_worker")
        return Prompt()

    def _handed(self, opened: Opened, seconds: float) -> Prompt:
        if opened.answer.status != 200:
            self._metrics.hand_off("refused")
            logger.info("the %s refused a prompt: %s", opened.worker, _said(opened))
            return Prompt(refusal=opened)
        handed = bodies.handed_over(opened.body)
        self._metrics.hand_off("without_kv" if handed is None else "handed_over")
        self._metrics.prompt_took(seconds)
        return Prompt(handed=handed)

    # ---- workers -----------------------------------------------------------------------------------

    async def _ask(self, worker: Worker, call: Call) -> Opened:
        began_s = time.monotonic()
        async with AsyncExitStack() as stack:
            answer = await stack.enter_async_context(worker.exchange(call))
            self._metrics.answered(worker, answer.status)
            opened = Opened(worker=worker, answer=answer)
            if answer.status != 200 or not answer.is_stream:
                opened.body = await answer.body(self._config.answer_bytes_max)
                return opened
            opened.events = whole_events(answer.parts, bytes_max=self._config.answer_bytes_max)
            stack.push_async_callback(opened.events.aclose)
            opened.body = await anext(opened.events, b"")
            self._metrics.stream_began(time.monotonic() - began_s)
            opened.held = stack.pop_all()
            return opened

    def _failed(self, worker: Worker, why: str) -> None:
        """Note that a worker did not serve a request, which another one may serve."""
        if self._ending is not None:
            raise self._ending
        self._metrics.failed(worker)
        logger.warning("the %s did not serve a request: %s", worker, why)

    def _too_slow(self) -> Problem:
        return Problem(
            f"the workers did not finish within {self._config.request_limit_s:g} s; ask for less, or start the proxy "
            "with a longer --request-limit",
            status=504,
            type="server_error",
            code="timeout",
        )

    def _no_decode_worker(self) -> Problem:
        states = Counter(worker.state.value for worker in self._workers.decode)
        found = ", ".join(f"{count} {state}" for state, count in states.items())
        return unavailable(f"no decode worker could serve the request (of {states.total()}: {found}); try again later")


def _no_prefill_worker() -> Problem:
    return unavailable(
        "no prefill worker could hand the prompt over, and the decode workers compute no prompts "
        "(kv_load_failure_policy fail); try again later"
    )


def worker_lost() -> Problem:
    return Problem(
        "the decode worker was lost in the middle of this answer, so the text above is not complete; send the request "
        "again",
        status=502,
        type="server_error",
        code="worker_lost",
    )


def _with(call: Call, fields: Fields, handed: msgspec.Raw) -> Call:
    return replace(call, body=bodies.for_decode(fields, handed))


def _said(opened: Opened) -> str:
    text = opened.body[:REASON_CHARACTERS_MAX].decode("utf-8", "replace")
    return f"it answered {opened.answer.status}: {' '.join(text.split())}"
