"""Detects an engine process that is alive but makes no progress.

The front end asks at intervals, and the engine answers between two steps, with the number of steps so far. An answer
shows progress if the engine has no work, or has finished a step since the answer before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.server.messages import Pong

START_LIMIT_S = 300.0
"""Longest stage of loading: a kernel may take a minute to compile on a busy machine."""
INTERVAL_S = 1.0


class Watchdog:
    """Watches one engine process after the other; call `begin` for each."""

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
        """Time without progress that is allowed now."""
        return max(self.limit_s, START_LIMIT_S) if self._starting else self.limit_s

    def loaded_some(self) -> None:
        self._silent_s = 0.0

    def became_ready(self) -> None:
        self._starting, self._silent_s = False, 0.0

    def answered(self, pong: Pong) -> None:
        if not pong.has_work or pong.steps != self._steps:
            self._silent_s = 0.0
        self._steps = pong.steps

    def is_hung(self, elapsed_s: float) -> bool:
        """Returns whether the engine hangs; `elapsed_s` is the time since the last call."""
        # After a much longer sleep than intended, this process was suspended, and the engine perhaps with it.
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
