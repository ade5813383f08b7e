"""Which names in the Host header a server answers to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.server.config import LOOPBACK
from outrider.server.front.problems import Problem
from outrider.server.http.answers import problem_answer


class Hosts:
    """ASGI middleware that refuses requests to other host names.

    A web page could make its visitor's browser send requests to a server without keys on this machine, under a name
    that points here; the Host header gives such requests away.
    """

    def __init__(self, app: Any, allowed: Iterable[str], advice: str) -> None:
        """`advice` says what to do about a refusal."""
        self._app = app
        self._allowed = frozenset(name.lower() for name in (*LOOPBACK, *allowed))
        self._advice = advice

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and _host(dict(scope["headers"]).get(b"host", b"")) not in self._allowed:
            problem = Problem(
                f"this server has no key, so it answers to names of this machine only; {self._advice}",
                status=403,
                code="host_not_allowed",
            )
            await problem_answer(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host(header: bytes) -> str:
    """Returns the host name without its port."""
    host = header.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
