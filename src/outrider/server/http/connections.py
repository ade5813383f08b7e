"""The time limit on the headers of a request; bodies have a limit of their own (bodies.py)."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with(header_limit_s: float) -> type[asyncio.Protocol]:
    """Returns a protocol that closes a connection unless a request's headers are complete within the limit."""

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def handle_events(self) -> None:
            super().handle_events()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._forget()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(header_limit_s, self.transport.close)

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    protocol: Any = TimedProtocol
    return protocol  # type: ignore[no-any-return]
