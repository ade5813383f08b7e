"""Runs a server until it is told to end: its socket, engine, HTTP server, signals and drain."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvicorn

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.server.config import ServerConfig
from outrider.server.front.problems import server_ends
from outrider.server.front.service import Service
from outrider.server.front.supervisor import Supervisor
from outrider.server.http.app import make_app
from outrider.server.http.connections import protocol_with
from outrider.server.messages import Facts, Loading
from outrider.server.observe.figures import Figures
from outrider.server.observe.metrics import Metrics
from outrider.server.observe.stat_log import log_figures
from outrider.server.observe.tracing import make_tracer

logger = logging.getLogger("outrider.server")

BACKLOG = 2048
LAST_RESPONSES_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Announcements:
    """Callbacks for loading progress and readiness; the command line prints them."""

    loading: Callable[[Loading], None] = lambda loading: None
    ready: Callable[[str, Facts], None] = lambda url, facts: None


def serve(config: ServerConfig, engine: EngineConfig, announcements: Announcements) -> None:
    """Serves until a drain has ended; raises ConfigError or ModelError if the server cannot start."""
    listener = listen(config)
    try:
        asyncio.run(_Run(config, engine, announcements, listener).run())
    finally:
        listener.close()


def listen(config: ServerConfig) -> socket.socket:
    """Returns a listening socket. Opened before the model is loaded, so that a port in use is reported at once."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as problem:
        # A host name that cannot be encoded is a UnicodeError.
        reason = getattr(problem, "strerror", None) or str(problem)
        bad_host = isinstance(problem, socket.gaierror | UnicodeError) or problem.errno == errno.EADDRNOTAVAIL
        advice = (
            "--host takes an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
            if bad_host
            else "choose another --port, or --port 0 for any free port"
        )
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}; {advice}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Filters out answers that were cut off at shutdown, which uvicorn logs as failures of the application."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `Drain`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class _Run:
    config: ServerConfig
    engine: EngineConfig
    announcements: Announcements
    listener: socket.socket

    async def run(self) -> None:
        figures = Figures()
        tracer = make_tracer(self.config.otlp_traces_endpoint)
        supervisor = Supervisor(
            self.engine,
            timeout_s=self.config.engine_timeout_s,
            on_report=figures.take,
            on_end=figures.engine_ended,
            on_loading=self.announcements.loading,
        )
        names = self.config.served_model_names or (self.engine.model,)
        metrics = Metrics(self.config.metrics_prefix, figures, names[0])
        service = Service(self.config, supervisor, metrics, tracer)
        app = make_app(service)
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                http=protocol_with(self.config.idle_limit_s),
                timeout_graceful_shutdown=5,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        drain = Drain(service, server)
        service.begin_drain = drain.begin
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, drain.on_signal)
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        logging_figures = None
        if self.config.log_interval_s:
            logging_figures = asyncio.create_task(log_figures(figures, self.config.log_interval_s))
        supervisor.start()
        try:
            await self._become_ready(service, serving)
            await serving
        finally:
            server.should_exit = True
            await service.close()
            await supervisor.stop()
            if logging_figures is not None:
                logging_figures.cancel()
            await serving
            tracer.close()

    async def _become_ready(self, service: Service, serving: asyncio.Task[None]) -> None:
        ready = service.supervisor.first_ready
        # `serving` ends first if a signal arrives while the model is loaded.
        await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return
        facts, url = await ready, url_of(self.listener)
        await service.prepare(facts)
        # A drain may have begun in the meantime.
        if not service.draining:
            self.announcements.ready(url, facts)


class Drain:
    """Refuses new requests, lets running ones finish within a limit, then ends the server. A second signal ends it at
    once."""

    def __init__(self, service: Service, server: uvicorn.Server) -> None:
        self._service = service
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._signalled = False
        self._hurry = asyncio.Event()

    def on_signal(self) -> None:
        """Begins a drain, or at the second signal ends it. A drain over HTTP does not count as the first signal."""
        if self._signalled:
            self._hurry.set()
        self._signalled = True
        self.begin()

    def begin(self) -> None:
        if self._task is None:
            self._service.drain_began.set()
            self._task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        limit_s, requests = self._service.config.drain_limit_s, self._service.supervisor.requests
        if requests.num_jobs:
            logger.info("draining: %d requests may go on for up to %g s", requests.num_jobs, limit_s)
        else:
            logger.info("no request is open; shutting down")
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while requests.num_jobs and not self._hurry.is_set():
                    await asyncio.sleep(0.05)
        if requests.num_jobs:
            logger.warning("%d requests did not finish in time", requests.num_jobs)
            requests.fail_all(server_ends())
            await asyncio.sleep(LAST_RESPONSES_S)
        self._server.should_exit = True
        # Connections may take long to close; a second signal does not wait for them.
        await self._hurry.wait()
        self._server.force_exit = True
