"""Who may ask what: API keys on every route but /health and the page's files, admin keys on admin routes.

A key comes as `Authorization: Bearer KEY`; browsers may send it as the password of basic authentication. All keys
are compared, each in constant time, so that how long it takes says nothing.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from hashlib import blake2b
from typing import Any

from outrider.server import page
from outrider.server.config import LOOPBACK, ServerConfig
from outrider.server.front.problems import Problem
from outrider.server.http.answers import send_problem

OPEN_PATHS = frozenset({"/health", *page.FILES})
"""The page is open, being where a person types the key; it is the same everywhere and shows nothing by itself."""
ADMIN_PREFIX = "/admin/"
TENANT = "outrider.tenant"
"""Where routes find in the ASGI scope whose request it is."""


class Keys:
    """ASGI middleware."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._app = app
        self._api = [_digest(key) for key in config.api_keys]
        self._admin = [_digest(key) for key in config.admin_keys]
        self._tenants = {_digest(key): tenant_of(key) for key in config.api_keys}
        # Without a key anything that a web page can make a browser send would be served, were it not for its Host.
        self._hosts = None
        if not config.api_keys and config.is_loopback:
            self._hosts = frozenset(name.lower() for name in (*LOOPBACK, *config.allowed_hosts))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            problem = self._problem(scope)
            if problem is not None:
                await send_problem(problem, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, scope: Any) -> Problem | None:
        headers = dict(scope["headers"])
        if self._hosts is not None and _host(headers.get(b"host", b"")) not in self._hosts:
            return Problem(
                "this server has no key, so it answers to names of this machine only; start it with --api-key, or "
                "with --allowed-host",
                status=403,
                code="host_not_allowed",
            )
        path: str = scope["path"]
        if path.startswith(ADMIN_PREFIX):
            return self._admin_problem(headers)
        if path in OPEN_PATHS or not self._api:
            return None
        digest = _digest(_given_key(headers))
        if _find(digest, self._api):
            scope[TENANT] = self._tenants[digest]
            return None
        return Problem(
            "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
            status=401,
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer" if _is_script(headers) else 'Bearer, Basic realm="outrider"'},
        )

    def _admin_problem(self, headers: dict[bytes, bytes]) -> Problem | None:
        if not self._admin:
            return Problem("there is no such route", status=404, code="not_found")
        if _find(_digest(_given_key(headers)), self._admin):
            return None
        return Problem(
            "an admin key is needed: send it as 'Authorization: Bearer KEY'",
            status=403,
            type="permission_error",
            code="invalid_admin_key",
        )


def tenant_of(key: str) -> str:
    """Salts the tenant's part of the prefix cache. It says nothing about the key."""
    return blake2b(key.encode(), digest_size=16, person=b"outrider tenant").hexdigest()


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=32, person=b"outrider key").digest()


def _find(digest: bytes, known: list[bytes]) -> bool:
    # Each is compared, whichever fits.
    return sum([hmac.compare_digest(digest, one) for one in known]) > 0


def _given_key(headers: dict[bytes, bytes]) -> str:
    scheme, _, rest = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode("utf-8").partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _is_script(headers: dict[bytes, bytes]) -> bool:
    """A script in a browser asks its user for a key itself; offered Basic, the browser would ask before it."""
    return headers.get(b"sec-fetch-mode", b"navigate") != b"navigate"


def _host(header: bytes) -> str:
    """Without its port."""
    host = header.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
