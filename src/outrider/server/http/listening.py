"""A listening socket, and the HTTP server on it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from outrider.errors import ConfigError
from outrider.server.http.connections import protocol_with

BACKLOG = 2048
CONNECTIONS_CLOSE_S = 5


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Opened before the model is loaded, so that a port in use is reported at once."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
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
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; {advice}") from None
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


def make_http_server(app: Any, *, idle_limit_s: float) -> uvicorn.Server:
    """Returns a server that `server.serve(sockets=[listener])` runs; headers must arrive within the limit."""
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            http=protocol_with(idle_limit_s),
            timeout_graceful_shutdown=CONNECTIONS_CLOSE_S,
        )
    )
