"""Server-sent events as a proxy passes them on: whole ones only, so that a lost worker leaves no half event behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from outrider.proxy.client import UpstreamError
from outrider.server.front.problems import Problem
from outrider.server.http.event_stream import DONE, event

ENDS = (b"\n\n", b"\r\n\r\n")


async def whole_events(parts: AsyncGenerator[bytes, None], *, bytes_max: int) -> AsyncGenerator[bytes, None]:
    """Yields the events that each part completes, at once."""
    begun = b""
    async for part in parts:
        begun += part
        end = max(place + len(mark) if (place := begun.rfind(mark)) >= 0 else 0 for mark in ENDS)
        if end:
            yield begun[:end]
            begun = begun[end:]
        if len(begun) > bytes_max:
            raise UpstreamError(f"an event of the stream is larger than {bytes_max:,} bytes", was_sent=True)
    if begun:
        yield begun


def error_events(path: str, problem: Problem) -> bytes:
    """Returns the events that end a stream whose worker was lost, as clients of the route expect them."""
    body = problem.body()
    if path == "/v1/responses":
        return event({**body["error"], **body, "type": "error"}, "error")
    return event(body) + DONE
