"""Workers that do as a test says, and a real proxy in front of them, all in one event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from outrider.proxy.app import Proxy, make_app
from outrider.proxy.config import ProxyConfig
from outrider.server.http.drain import Drain
from outrider.server.http.listening import listen, make_http_server, url_of

LIMIT_S = 20.0
TICKET = '{"do_remote_prefill":true,  "ticket":"T1=="}'
"""What a prefill worker says: with two blanks, since it must arrive as it was written."""


@dataclass
class Exchange:
    """One request that a fake worker has received."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the proxy has closed the connection."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def answer(self, content: str | bytes, *, status: int = 200, kind: str = "application/json") -> None:
        body = content.encode() if isinstance(content, str) else content
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nretry-after: 7\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def begin_stream(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await self.writer.drain()

    async def send(self, text: str) -> None:
        data = text.encode()
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def end_stream(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def hang(self) -> None:
        """Say nothing more until the proxy gives up."""
        async with asyncio.timeout(LIMIT_S):
            await self.closed.wait()


Behaviour = Callable[[Exchange], Awaitable[None]]


async def prefill(exchange: Exchange) -> None:
    """What a prefill worker does with a prompt."""
    await exchange.answer(f'{{"id":"p","choices":[],"kv_transfer_params":{TICKET}}}')


async def decode(exchange: Exchange) -> None:
    """What a decode worker does with a request that is not streamed."""
    await exchange.answer('{"choices":[{"text":"ok"}]}')


async def refuse(exchange: Exchange) -> None:
    await exchange.answer('{"error":{"message":"not now","code":"unavailable"}}', status=503)


async def close(exchange: Exchange) -> None:
    """What a worker does that dies."""
    exchange.writer.transport.abort()


async def hang(exchange: Exchange) -> None:
    await exchange.hang()


class FakeWorker:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[Exchange] = []
        """Requests other than questions about the worker's state."""
        self.states: dict[str, tuple[int, str]] = {}
        """Answers to those questions, by path; without one, the worker is ready, and of another make."""
        self.is_silent = False
        """Whether questions about the state are not answered."""
        self.url = ""
        self._server: asyncio.Server | None = None

    async def start(self, secure: ssl.SSLContext | None = None) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=secure)
            host, port = self._server.sockets[0].getsockname()
            self.url = f"http://{host}:{port}" if secure is None else f"https://localhost:{port}"

    async def stop(self) -> None:
        """End listening: further connections are refused."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            method, target, _version = first.split(" ")
            exchange = Exchange(method, target, headers, body, writer)
            if target in ("/ready", "/health", "/kv_transfer"):
                await self._tell(exchange, target)
                return
            self.requests.append(exchange)
            behaving = asyncio.ensure_future(self.behaviour(exchange))
            watching = asyncio.create_task(_closed(reader, exchange))
            await behaving
            watching.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _tell(self, exchange: Exchange, target: str) -> None:
        if self.is_silent:
            await asyncio.sleep(LIMIT_S)
        default = (404, "{}") if target == "/kv_transfer" else (200, "{}")
        status, body = self.states.get(target, default)
        await exchange.answer(body, status=status)


async def _closed(reader: asyncio.StreamReader, exchange: Exchange) -> None:
    try:
        await reader.read()
    except ConnectionError:
        pass
    exchange.closed.set()


@dataclass(frozen=True)
class Running:
    proxy: Proxy
    client: httpx.AsyncClient
    drain: Drain
    server: uvicorn.Server
    serving: asyncio.Task[None]

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "Once upon a time"} | fields)

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over the series with these labels."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if line.startswith(f"outrider:proxy_{name}") and all(w in line for w in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@asynccontextmanager
async def running(
    prefill_workers: Sequence[FakeWorker], decode_workers: Sequence[FakeWorker], **settings: Any
) -> AsyncIterator[Running]:
    """A proxy that serves, in front of these workers, after its first look at them."""
    async with AsyncExitStack() as stack:
        for worker in (*prefill_workers, *decode_workers):
            await worker.start()
            stack.push_async_callback(worker.stop)
        config = ProxyConfig(
            prefill=tuple(worker.url for worker in prefill_workers),
            decode=tuple(worker.url for worker in decode_workers),
            **({"health_interval_s": 0.05, "health_limit_s": 0.3, "health_failures_max": 2} | settings),
        )
        proxy = Proxy(config)
        listener = listen("127.0.0.1", 0)
        server = make_http_server(make_app(proxy), idle_limit_s=config.idle_limit_s)
        drain = Drain(proxy, server, limit_s=config.drain_limit_s, began=proxy.drain_began)
        await asyncio.gather(*(worker.look(config) for worker in proxy.workers.all))
        watching = asyncio.create_task(proxy.workers.watch())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url_of(listener), timeout=LIMIT_S))
        try:
            yield Running(proxy, client, drain, server, serving)
        finally:
            server.should_exit = server.force_exit = True
            watching.cancel()
            await client.aclose()
            await serving
            listener.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)
