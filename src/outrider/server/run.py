"""Runs a server until it is told to end: socket, engine, HTTP, signals, drain."""

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
LAST_ANSWERS_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Announcements:
    """Whom to tell about what; the command line prints it."""

    loading: Callable[[Loading], None] = lambda loading: None
    ready: Callable[[str, Facts], None] = lambda url, facts: None


def serve(config: ServerConfig, engine: EngineConfig, announcements: Announcements) -> None:
    """Returns after a drain; raises ConfigError or ModelError if it cannot begin."""
    listener = listen(config)
    try:
        asyncio.run(_Run(config, engine, announcements, listener).run())
    finally:
        listener.close()


def listen(config: ServerConfig) -> socket.socket:
    """Before anything is loaded: a port that is taken is known at once."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as problem:
        # A name that cannot even be asked for is a UnicodeError.
        reason = getattr(problem, "strerror", None) or str(problem)
        bad_host = isinstance(problem, socket.gaierror | UnicodeError) or problem.errno == errno.EADDRNOTAVAIL
        advice = (
            "--host takes an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
            if bad_host
            else "choose another --port, or --port 0 for any that is free"
        )
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}; {advice}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_no_cut_off_answer(record: logging.LogRecord) -> bool:
    """The HTTP server logs answers that it cuts off at its end as if the application had failed."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class _Server(uvicorn.Server):
    """Signals are ours: the first begins a drain, it does not end anything."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Run:
    def __init__(
        self, config: ServerConfig, engine: EngineConfig, announcements: Announcements, listener: socket.socket
    ) -> None:
        self._config = config
        self._engine = engine
        self._announcements = announcements
        self._listener = listener

    async def run(self) -> None:
        figures = Figures()
        tracer = make_tracer(self._config.otlp_traces_endpoint)
        supervisor = Supervisor(
            self._engine,
            grammar_compile_limit_s=self._config.grammar_compile_limit_s,
            timeout_s=self._config.engine_timeout_s,
            on_report=figures.take,
            on_end=figures.engine_ended,
            on_loading=self._announcements.loading,
        )
        names = self._config.served_model_names or (self._engine.model,)
        metrics = Metrics(self._config.metrics_prefix, figures, names[0])
        service = Service(self._config, supervisor, metrics, tracer)
        app = make_app(service)
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                http=protocol_with(self._config.idle_limit_s),
                timeout_graceful_shutdown=5,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_no_cut_off_answer)
        drain = Drain(service, server)
        service.begin_drain = drain.begin
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, drain.asked)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        logging_figures = None
        if self._config.log_interval_s:
            logging_figures = asyncio.create_task(log_figures(figures, self._config.log_interval_s))
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
        # Told to end before there is anything to serve.
        await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return
        facts, url = await ready, url_of(self._listener)
        await service.prepare(facts)
        # Told to end meanwhile: nobody can reach it any more.
        if not service.draining:
            self._announcements.ready(url, facts)


class Drain:
    """Nothing new is taken; what runs may finish, within limits; then the server ends. A second signal ends it."""

    def __init__(self, service: Service, server: uvicorn.Server) -> None:
        self._service = service
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._signalled = False
        self._at_once = asyncio.Event()

    def asked(self) -> None:
        """By a signal. One that comes after a drain was asked for over HTTP is the first all the same."""
        if self._signalled:
            self._at_once.set()
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
            logger.info("no request is open; the server ends")
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while requests.num_jobs and not self._at_once.is_set():
                    await asyncio.sleep(0.05)
        if requests.num_jobs:
            logger.warning("%d requests did not finish in time", requests.num_jobs)
            requests.fail_all(server_ends())
            await asyncio.sleep(LAST_ANSWERS_S)
        self._server.should_exit = True
        # From here on it is up to connections that take their time to close.
        await self._at_once.wait()
        self._server.force_exit = True
