"""The outermost middleware: counts requests by route and status, and records when each arrived."""

from __future__ import annotations

import time
from typing import Any

from outrider.server.observe.metrics import Metrics

ARRIVAL = "outrider.arrival_s"
"""Key in the ASGI scope under which routes find when their request arrived, by the monotonic clock."""
NO_ROUTE = "none"


class Counting:
    """ASGI middleware that counts requests and records their arrival."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVAL] = time.monotonic()

        async def counted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                # Not the path, of which clients could invent any number.
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                self._metrics.count_http(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted_send)
