"""Requests to workers over HTTP/1.1: one connection each, answers as they arrive.

A connection is not used again. Opening one costs nothing beside computing a prompt; and on a fresh connection a failure
always means that this worker does not answer, never that it has closed an idle connection at the same moment.
Leaving an exchange early closes its connection, which aborts the request on the worker. So does aborting the
connection's transport from outside, which ends the exchange with an error.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from outrider.errors import OutriderError
from outrider.proxy.config import SCHEMES

READ_BYTES = 64 << 10
HEADERS_BYTES_MAX = 64 << 10

Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(OutriderError):
    """A worker did not answer, or not to the end."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        """Whether the worker may have seen the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    method: str
    target: str
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Headers
    parts: AsyncGenerator[bytes, None]
    """The body, as it arrives. Raises UpstreamError if it is cut off."""

    def header(self, name: bytes) -> bytes:
        return next((value for each, value in self.headers if each == name), b"")

    @property
    def is_stream(self) -> bool:
        return self.header(b"content-type").partition(b";")[0].strip() == b"text/event-stream"

    async def body(self, bytes_max: int) -> bytes:
        parts, size = [], 0
        async for part in self.parts:
            size += len(part)
            if size > bytes_max:
                raise UpstreamError(f"the answer is larger than {bytes_max:,} bytes", was_sent=True)
            parts.append(part)
        return b"".join(parts)


@asynccontextmanager
async def exchange(
    url: str, call: Call, *, connect_limit_s: float, transports: set[asyncio.WriteTransport]
) -> AsyncIterator[Answer]:
    """Sends a request and yields the answer, once its headers are there. The caller limits the time.

    The connection's transport is in `transports` while the exchange goes on.
    """
    reader, writer = await _connect(url, connect_limit_s)
    transports.add(writer.transport)
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADERS_BYTES_MAX)
        try:
            await _send(connection, writer, url, call)
            response = await _next_event(connection, reader)
            while isinstance(response, h11.InformationalResponse):
                response = await _next_event(connection, reader)
        except (OSError, h11.ProtocolError) as problem:
            raise UpstreamError(_reason(problem), was_sent=True) from None
        assert isinstance(response, h11.Response)
        parts = _parts(connection, reader)
        try:
            yield Answer(status=response.status_code, headers=list(response.headers), parts=parts)
        finally:
            await parts.aclose()
    finally:
        transports.discard(writer.transport)
        # A worker that is suspended would not take part in an orderly end.
        writer.transport.abort()


async def _connect(url: str, limit_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.open_connection(parts.hostname, parts.port or SCHEMES[parts.scheme], ssl=secure)
    except TimeoutError:
        raise UpstreamError(f"no connection within {limit_s:g} s", was_sent=False) from None
    except (OSError, UnicodeError) as problem:
        raise UpstreamError(_reason(problem), was_sent=False) from None


async def _send(connection: h11.Connection, writer: asyncio.StreamWriter, url: str, call: Call) -> None:
    headers = [(b"host", urlsplit(url).netloc.encode()), (b"connection", b"close"), *call.headers]
    if call.body or call.method not in ("GET", "HEAD"):
        headers.append((b"content-length", str(len(call.body)).encode()))
    request = h11.Request(method=call.method, target=call.target, headers=headers)
    data = connection.send(request) or b""
    if call.body:
        data += connection.send(h11.Data(data=call.body)) or b""
    data += connection.send(h11.EndOfMessage()) or b""
    writer.write(data)
    await writer.drain()


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("the connection was closed")
        else:
            return event


async def _parts(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            event = await _next_event(connection, reader)
            if isinstance(event, h11.EndOfMessage):
                return
            assert isinstance(event, h11.Data)
            yield bytes(event.data)
    except (OSError, h11.ProtocolError) as problem:
        raise UpstreamError(_reason(problem), was_sent=True) from None


def _reason(problem: Exception) -> str:
    if isinstance(problem, ConnectionRefusedError):
        return "the connection was refused"
    if isinstance(problem, h11.ProtocolError | ConnectionResetError | BrokenPipeError):
        return "the connection was closed"
    return getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
