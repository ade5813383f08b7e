"""Runs a server until it is told to end: its socket, engine, HTTP server, signals and drain."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.server.config import ServerConfig
from outrider.server.front.service import Service
from outrider.server.front.supervisor import Supervisor
from outrider.server.http.app import make_app
from outrider.server.http.drain import Drain
from outrider.server.http.listening import listen, make_http_server, url_of
from outrider.server.messages import Facts, Loading
from outrider.server.observe.figures import Figures
from outrider.server.observe.metrics import Metrics
from outrider.server.observe.stat_log import log_figures
from outrider.server.observe.tracing import make_tracer


@dataclass(frozen=True, kw_only=True)
class Announcements:
    """Callbacks for loading progress and readiness; the command line prints them."""

    loading: Callable[[Loading], None] = lambda loading: None
    ready: Callable[[str, Facts], None] = lambda url, facts: None


def serve(config: ServerConfig, engine: EngineConfig, announcements: Announcements) -> None:
    """Serves until a drain has ended; raises ConfigError or ModelError if the server cannot start."""
    listener = listen(config.host, config.port)
    try:
        asyncio.run(_Run(config, engine, announcements, listener).run())
    finally:
        listener.close()


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
        server = make_http_server(app, idle_limit_s=self.config.idle_limit_s)
        drain = Drain(
            supervisor.requests,
            server,
            limit_s=self.config.drain_limit_s,
            began=service.drain_began,
            prompts_held=lambda: figures.prompts_held,
        )
        service.begin_drain = drain.begin
        drain.install_signal_handlers()
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        logging_figures = None
        if self.config.log_interval_s:
            with_transfers = self.engine.kv_transfer_config is not None
            logging_figures = asyncio.create_task(
                log_figures(figures, self.config.log_interval_s, with_transfers=with_transfers)
            )
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
