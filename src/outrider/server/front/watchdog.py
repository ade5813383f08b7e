"""Notices an engine process that lives but gets nowhere.

The front end asks every so often, and the engine answers between two steps, with the number of steps so far. An
answer shows progress if the engine has nothing to do, or has done a step since the answer before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.server.messages import Alive

START_LIMIT_S = 300.0
"""For one stage of loading: a kernel may take a minute to compile where others use the processor too."""
INTERVAL_S = 1.0


class Watchdog:
    """For one engine process after the other; `begin` with each."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._interval_s = min(INTERVAL_S, limit_s / 4)
        self._starting = True
        self._silent_s = 0.0
        self._steps = -1

    def begin(self) -> None:
        self._starting, self._silent_s, self._steps = True, 0.0, -1

    @property
    def allowed_s(self) -> float:
        """How long there may be no progress now."""
        return max(self.limit_s, START_LIMIT_S) if self._starting else self.limit_s

    def loaded_some(self) -> None:
        self._silent_s = 0.0

    def became_ready(self) -> None:
        self._starting, self._silent_s = False, 0.0

    def answered(self, alive: Alive) -> None:
        if not alive.has_work or alive.steps != self._steps:
            self._silent_s = 0.0
        self._steps = alive.steps

    def is_hung(self, elapsed_s: float) -> bool:
        """So much time has gone by since the last call."""
        # Longer than we meant to sleep: then we were stopped ourselves, and the engine perhaps with us.
        self._silent_s += min(elapsed_s, 2 * self._interval_s)
        return self._silent_s > self.allowed_s

    async def watch(self, ask: Callable[[], None]) -> None:
        """Returns when the engine has made no progress for too long."""
        before = time.monotonic()
        while True:
            if not self._starting:
                ask()
            await asyncio.sleep(self._interval_s)
            now = time.monotonic()
            if self.is_hung(now - before):
                return
            before = now
