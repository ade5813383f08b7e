"""Runs a proxy until it is told to end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from outrider.proxy.app import Proxy, make_app
from outrider.proxy.config import ProxyConfig
from outrider.proxy.workers import Workers
from outrider.server.http.drain import Drain
from outrider.server.http.listening import listen, make_http_server, url_of

Announce = Callable[[str, Workers], None]


def serve_proxy(config: ProxyConfig, announce: Announce) -> None:
    """Serves until a drain has ended; raises ConfigError if the proxy cannot start.

    `announce` gets the proxy's URL and its workers, once each worker has been asked whether it serves.
    """
    listener = listen(config.host, config.port)
    try:
        asyncio.run(_run(config, announce, listener))
    finally:
        listener.close()


async def _run(config: ProxyConfig, announce: Announce, listener: socket.socket) -> None:
    proxy = Proxy(config)
    server = make_http_server(make_app(proxy), idle_limit_s=config.idle_limit_s)
    drain = Drain(proxy, server, limit_s=config.drain_limit_s, began=proxy.drain_began)
    drain.install_signal_handlers()
    await asyncio.gather(*(worker.look(config) for worker in proxy.workers.all))
    announce(url_of(listener), proxy.workers)
    watching = asyncio.create_task(proxy.workers.watch())

    def end(task: asyncio.Task[None]) -> None:
        # A proxy that does not see its workers any more must not go on; its exception is raised below.
        server.should_exit = True

    watching.add_done_callback(end)
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
