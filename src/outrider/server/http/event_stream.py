"""Server-sent events, and what happens when the client disconnects.

A client that disconnects, or receives nothing for too long, cancels the task that produces the events, and with it
the request in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from outrider.server.http.answers import to_json

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that buffers the response would hold the events back.
    (b"x-accel-buffering", b"no"),
]


def event(content: object, name: str | None = None) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_json(content) + b"\n\n"


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        held: AsyncExitStack,
        *,
        idle_limit_s: float,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """`held` owns what the events come from, and is closed when the stream ends, however it ends."""
        super().__init__()
        self._events = events
        self._held = held
        self._idle_limit_s = idle_limit_s
        self._more_headers = headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sender = asyncio.create_task(self._send_all(send))
        listener = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sender, listener), return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.cancel()
            if not sender.done():
                sender.cancel()
            with suppress(asyncio.CancelledError, OSError, TimeoutError):
                await sender
            await self._events.aclose()
            await self._held.aclose()

    async def _send_all(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._more_headers]})
        async for chunk in self._events:
            async with asyncio.timeout(self._idle_limit_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Returns the result of the work; None if the client disconnects first, which cancels the work."""
    worker = asyncio.create_task(work)
    listener = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((worker, listener), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        return None
    finally:
        listener.cancel()
        if not worker.done():
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
