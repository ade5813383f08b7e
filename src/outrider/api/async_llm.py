"""`AsyncLLM`: the same engine for many callers at once, stepping in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from outrider.api.llm import LLM, Message, Prompt, new_request_id
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.errors import RequestError
from outrider.models.resolve import DEFAULT_MODEL
from outrider.sampling import SamplingParams

logger = logging.getLogger("outrider")

Delivery = Callable[[RequestOutput | Exception], None]


class AsyncLLM:
    """Use as `async with AsyncLLM(...) as llm: async for output in llm.generate(prompt, params): ...`."""

    def __init__(self, model: str = DEFAULT_MODEL, *, llm: LLM | None = None, **settings: Any) -> None:
        """`settings` are as for `LLM`. An `llm` that is loaded already may be given instead; nothing else may use it
        meanwhile."""
        self._llm = llm if llm is not None else LLM(model, **settings)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliveries: dict[str, Delivery] = {}
        self._ended: Exception | None = None
        """Why nothing is served any more. The lock guards it and the queue together: no order comes after the end."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="outrider-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def engine(self) -> Engine:
        """The engine, which steps in a thread of its own: what it counts may be read, and nothing changed."""
        return self._llm.engine

    def close(self) -> None:
        """End every request and stop the thread."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._llm.engine.wake()
            self._thread.join()

    # ---- callers -----------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        speculate: bool = True,
        num_speculative_tokens: int | None = None,
        hand_over: bool = False,
        ticket: str | None = None,
        salt: str = "",
        compute_prompt: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; yields the result so far after each step that adds to it. Closing the iterator early
        aborts the request. The options are those of `LLM.generate`; prompts with different salts share nothing in the
        prefix cache, and with `compute_prompt` a decode worker computes a prompt that has no ticket."""
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"a request's id must be a string, got {type(request_id).__name__}")
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        params = SamplingParams() if sampling_params is None else sampling_params
        name = new_request_id() if request_id is None else request_id

        def deliver(item: RequestOutput | Exception) -> None:
            _unless_closed(loop, arrivals.put_nowait, item)

        options = {
            "speculate": speculate,
            "num_speculative_tokens": num_speculative_tokens,
            "hand_over": hand_over,
            "ticket": ticket,
            "salt": salt,
            "compute_prompt": compute_prompt,
        }
        if not self._order(lambda: self._start(name, prompt, params, deliver, options)):
            assert self._ended is not None
            raise self._ended
        finished = False
        try:
            while not finished:
                item = await arrivals.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._order(lambda: self._abort(name, deliver))

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation. `options` are those of `generate`."""
        prompt: Mapping[str, Any] = {"prompt_token_ids": self._llm.chat_prompt(messages)}
        return self.generate(prompt, sampling_params, **options)

    def _order(self, order: Callable[[], None]) -> bool:
        """Have the engine's thread carry out an order; False if nothing is served any more."""
        with self._lock:
            if self._ended is None:
                self._orders.put(order)
                self._llm.engine.wake()
            return self._ended is None

    # ---- the engine's thread -----------------------------------------------------------------------

    def _work(self) -> None:
        engine = self._llm.engine
        try:
            while True:
                while not engine.has_work or not self._orders.empty():
                    try:
                        order = self._orders.get(timeout=engine.tend_within_s)
                    except queue.Empty:
                        engine.tend()
                        continue
                    if order is None:
                        self._end(RequestError("the engine is closed; make a new AsyncLLM"))
                        return
                    order()
                for output in engine.step():
                    self._deliver(output)
                if engine.waits:
                    engine.wait()
        except BaseException as error:
            # Every caller is told, so that none waits for ever.
            logger.exception("the engine stopped")
            self._end(error if isinstance(error, Exception) else RuntimeError(f"the engine stopped: {error!r}"))

    def _end(self, error: Exception) -> None:
        """Serve nothing more, and tell why to all callers that wait or are still in the queue, even where an engine
        that has stopped fails to abort a request too."""
        with self._lock:
            self._ended = error
        while not self._orders.empty():
            order = self._orders.get()
            if order is not None:
                with suppress(BaseException):
                    order()
        waiting, self._deliveries = self._deliveries, {}
        for deliver in waiting.values():
            deliver(error)
        for name in waiting:
            with suppress(BaseException):
                self._llm.engine.abort(name)

    def _start(
        self, name: str, prompt: Prompt, params: SamplingParams, deliver: Delivery, options: Mapping[str, Any]
    ) -> None:
        if self._ended is not None:
            deliver(self._ended)
            return
        try:
            text, ids = self._llm.encode(prompt)
            self._llm.engine.add_request(name, ids, params, prompt=text, **options)
        except Exception as error:
            # Whatever is wrong with this request, other callers are not affected.
            if not isinstance(error, RequestError):
                logger.exception("request %r could not be started", name)
            deliver(error)
            return
        self._deliveries[name] = deliver

    def _abort(self, name: str, deliver: Delivery) -> None:
        """Abort the request of a caller that went away. If its id was refused because another request has it, that one
        goes on."""
        if self._deliveries.get(name) is deliver:
            del self._deliveries[name]
            self._llm.engine.abort(name)

    def _deliver(self, output: RequestOutput) -> None:
        deliver = self._deliveries.get(output.request_id)
        if deliver is None:
            return
        deliver(_snapshot(output))
        if output.finished:
            del self._deliveries[output.request_id]


def _snapshot(output: RequestOutput) -> RequestOutput:
    """Returns a result that stays as it is while the engine goes on writing to its own."""
    result = copy(output)
    result.metrics = copy(output.metrics)
    result.metrics.speculation = copy(output.metrics.speculation)
    result.outputs = []
    for continuation in output.outputs:
        fixed = copy(continuation)
        # The record of the tokens is shared: it only grows, and `origins` says how much of it to show.
        fixed.origins, fixed.pieces = list(continuation.origins), list(continuation.pieces)
        fixed.logprobs = None if continuation.logprobs is None else list(continuation.logprobs)
        result.outputs.append(fixed)
    return result


def _unless_closed(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], item: object) -> None:
    """Call back in the caller's event loop, unless that is closed: the caller no longer listens then."""
    try:
        loop.call_soon_threadsafe(call, item)
    except RuntimeError:
        return
