"""How a server ends: open requests may finish, KV that is held for decode workers may be fetched, and new requests are
refused."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import uvicorn

from outrider.server.front.problems import Problem, server_ends

logger = logging.getLogger("outrider.server")

LAST_RESPONSES_S = 0.2


class Jobs(Protocol):
    """The requests that are open."""

    @property
    def num_jobs(self) -> int: ...

    def fail_all(self, problem: Problem) -> None: ...


class Drain:
    """Refuses new requests, lets running ones finish within a limit, then ends the server. A second signal ends it at
    once."""

    def __init__(
        self,
        requests: Jobs,
        server: uvicorn.Server,
        *,
        limit_s: float,
        began: asyncio.Event,
        prompts_held: Callable[[], int] = lambda: 0,
    ) -> None:
        """`began` is set when the drain begins; the routes that take requests look at it. `prompts_held`: returns the
        number of prompts whose KV is held for decode workers, which have been told that they can fetch it."""
        self._requests = requests
        self._server = server
        self._limit_s = limit_s
        self._began = began
        self._prompts_held = prompts_held
        self._task: asyncio.Task[None] | None = None
        self._signalled = False
        self._hurry = asyncio.Event()

    def install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        """Begins a drain, or at the second signal ends it. A drain over HTTP does not count as the first signal."""
        if self._signalled:
            self._hurry.set()
        self._signalled = True
        self.begin()

    def begin(self) -> None:
        if self._task is None:
            self._began.set()
            self._task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        limit_s, requests = self._limit_s, self._requests
        if requests.num_jobs or self._prompts_held():
            held = self._prompts_held()
            waiting = f", and decode workers may fetch the KV of {held} prompts" if held else ""
            logger.info("draining: %d requests may go on for up to %g s%s", requests.num_jobs, limit_s, waiting)
        else:
            logger.info("no request is open; shutting down")
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while (requests.num_jobs or self._prompts_held()) and not self._hurry.is_set():
                    await asyncio.sleep(0.05)
        if self._prompts_held():
            logger.warning("the KV of %d prompts was not fetched in time", self._prompts_held())
        if requests.num_jobs:
            logger.warning("%d requests did not finish in time", requests.num_jobs)
            requests.fail_all(server_ends())
            await asyncio.sleep(LAST_RESPONSES_S)
        self._server.should_exit = True
        # Connections may take long to close; a second signal does not wait for them.
        await self._hurry.wait()
        self._server.force_exit = True
