"""The HTTP application of a proxy: three routes of its own, and all others passed on to workers."""

from __future__ import annotations

import asyncio
import posixpath
import re
import secrets
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from outrider import __version__
from outrider.proxy.client import Call, Headers
from outrider.proxy.config import ProxyConfig
from outrider.proxy.forwarding import Forwarding, Opened
from outrider.proxy.metrics import ProxyMetrics
from outrider.proxy.workers import Role, State, Worker, Workers
from outrider.server.front.problems import Problem, server_ends, unavailable
from outrider.server.http import errors
from outrider.server.http.answers import json_answer, problem_answer
from outrider.server.http.bodies import BodyLimits
from outrider.server.http.event_stream import EventStream, unless_disconnected
from outrider.server.http.hosts import Hosts
from outrider.server.observe.metrics import CONTENT_TYPE

OWN_PATHS = ("/health", "/ready", "/metrics")
ADMIN_PREFIX = "/admin/"
DISCONNECTED_STATUS = 499
REQUEST_ID = b"x-request-id"
PASSED_ON = frozenset(
    {
        b"accept",
        b"authorization",
        b"content-type",
        b"sec-fetch-mode",
        b"traceparent",
        b"tracestate",
        b"user-agent",
        REQUEST_ID,
    }
)
"""Headers of a client that workers get. The others concern the connection, or no worker reads them."""
KEPT_BACK = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers of a worker that concern its connection to the proxy."""
PLAIN_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
KNOWN_HANDLERS = re.compile(
    r"/v1/(completions|chat/completions|responses|models)|/(de)?tokenize|/version|/kv(/stream)?|/kv_transfer"
)


class Proxy:
    """What the routes work with."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self.workers = Workers(config)
        self.metrics = ProxyMetrics(self.workers)
        self.forwarding = Forwarding(config, self.workers, self.metrics)
        self.drain_began = asyncio.Event()
        self.num_jobs = 0
        """Number of clients that wait for an answer, or have not yet received all of theirs."""

    def fail_all(self, problem: Problem) -> None:
        self.forwarding.end_all(problem)

    def why_refused(self) -> Problem | None:
        """Returns the reason for which no further request is taken now."""
        if self.drain_began.is_set():
            return server_ends()
        if self.num_jobs < self.config.requests_max:
            return None
        return Problem(
            f"the proxy is full ({self.num_jobs} requests are open); try again in a moment",
            status=429,
            type="rate_limit_error",
            code="queue_full",
            retry_after_s=1,
        )


def make_app(proxy: Proxy) -> FastAPI:
    app = FastAPI(title="Outrider proxy", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)

    @app.head("/health")
    @app.get("/health")
    async def health() -> Response:
        return json_answer({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if proxy.drain_began.is_set():
            raise unavailable("the proxy is draining; try again in a moment")
        serving = {role: _num_ready(proxy.workers, role) for role in Role}
        if not serving[Role.DECODE]:
            raise unavailable("no decode worker serves; try again in a moment")
        return json_answer({"status": "ready", **{f"{role.value}_workers": num for role, num in serving.items()}})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(proxy.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/{path:path}")
    @app.post("/{path:path}")
    async def forward(request: Request) -> Response:
        return await _forward(proxy, request)

    config = proxy.config
    # The middleware that is added last runs first.
    app.add_middleware(BodyLimits, bytes_max=config.body_bytes_max, limit_s=config.idle_limit_s)
    app.add_middleware(Jobs, proxy=proxy)
    if config.is_loopback:
        app.add_middleware(Hosts, allowed=config.allowed_hosts, advice="start it with --allowed-host")
    return app


class Jobs:
    """ASGI middleware that counts open requests, and refuses more of them than there may be."""

    def __init__(self, app: Any, proxy: Proxy) -> None:
        self._app = app
        self._proxy = proxy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OWN_PATHS:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        # Not any path, of which clients could invent any number.
        handler = path if KNOWN_HANDLERS.fullmatch(path) else "other"

        async def counted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._proxy.metrics.count_http(handler, message["status"])
            await send(message)

        problem = self._proxy.why_refused()
        if problem is not None:
            await problem_answer(problem)(scope, receive, counted_send)
            return
        self._proxy.num_jobs += 1
        try:
            await self._app(scope, receive, counted_send)
        finally:
            self._proxy.num_jobs -= 1


async def _forward(proxy: Proxy, request: Request) -> Response:
    path: str = request.scope["path"]
    # A server in front of a worker may resolve "..", and join slashes.
    if posixpath.normpath("/" + path.lstrip("/")).startswith(ADMIN_PREFIX) or path.startswith(ADMIN_PREFIX):
        raise Problem(
            "the proxy has no admin routes, since they concern one worker; ask the worker itself",
            status=404,
            code="not_found",
        )
    name = request_id(request)
    call = Call(
        method=request.method, target=_target(request), headers=_passed_on(request, name), body=await request.body()
    )
    deadline_s = asyncio.get_running_loop().time() + proxy.config.request_limit_s
    opened = await unless_disconnected(request, proxy.forwarding.open(path, call))
    if opened is None:
        return Response(status_code=DISCONNECTED_STATUS)
    headers = _returned(opened, name)
    if opened.events is None:
        answer = Response(opened.body, status_code=opened.answer.status)
        answer.raw_headers += headers
        return answer
    events = proxy.forwarding.stream(path, opened, deadline_s=deadline_s)
    return EventStream(events, opened.held, idle_limit_s=proxy.config.idle_limit_s, headers=headers)


def request_id(request: Request) -> bytes:
    """Returns the id under which workers and clients know a request: the client's own, or a new one."""
    given = request.headers.get(REQUEST_ID.decode(), "").encode("latin-1")
    return given if PLAIN_REQUEST_ID.fullmatch(given) else secrets.token_hex(12).encode()


def _target(request: Request) -> str:
    # As the client wrote it, since workers decode it themselves.
    path = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope.get("query_string", b"")
    return (path + (b"?" + query if query else b"")).decode("latin-1")


def _passed_on(request: Request, name: bytes) -> Headers:
    passed = [(key, value) for key, value in request.headers.raw if key in PASSED_ON and key != REQUEST_ID]
    return [*passed, (REQUEST_ID, name)]


def _returned(opened: Opened, name: bytes) -> list[tuple[bytes, bytes]]:
    answer = opened.answer
    # An event stream writes those headers itself that say what it is.
    of_stream = (b"content-type", b"cache-control", b"x-accel-buffering") if answer.is_stream else ()
    kept = [
        (key, _reachable(value, opened.worker) if key == b"location" else value)
        for key, value in answer.headers
        if key not in KEPT_BACK and key not in of_stream
    ]
    return kept if any(key == REQUEST_ID for key, _value in kept) else [*kept, (REQUEST_ID, name)]


def _reachable(location: bytes, worker: Worker) -> bytes:
    """Returns where an answer sends the client. A worker that names itself means the proxy: clients must not learn its
    address, nor go past the proxy."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return location
    if parts.netloc.lower() != urlsplit(worker.url).netloc.lower().encode():
        return location
    # Slashes at the beginning would be read as another host.
    return urlunsplit((b"", b"", b"/" + parts.path.lstrip(b"/"), parts.query, parts.fragment))


def _num_ready(workers: Workers, role: Role) -> int:
    return sum(worker.state is State.READY for worker in workers.of(role))
