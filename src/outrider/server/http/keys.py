"""Authentication: API keys on every route but /health and the playground's files, admin keys on admin routes.

A key comes as `Authorization: Bearer KEY`; browsers may send it as the password of basic authentication. A key is
compared with all keys, each in constant time, so that timing reveals nothing.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from hashlib import blake2b
from typing import Any

from outrider.server import page
from outrider.server.config import ServerConfig
from outrider.server.front.problems import Problem
from outrider.server.http.answers import problem_answer

OPEN_PATHS = frozenset({"/health", *page.FILES})
"""Paths that need no key. The playground is where users type their key, and holds no data by itself."""
ADMIN_PREFIX = "/admin/"
TENANT = "outrider.tenant"
"""Key in the ASGI scope under which routes find the tenant of their request."""


class Keys:
    """ASGI middleware that refuses requests without a valid key."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._app = app
        self._api = [_digest(key) for key in config.api_keys]
        self._admin = [_digest(key) for key in config.admin_keys]
        self._tenants = {_digest(key): tenant_of(key) for key in config.api_keys}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            problem = self._problem(scope)
            if problem is not None:
                await problem_answer(problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, scope: Any) -> Problem | None:
        headers = dict(scope["headers"])
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
    """Returns the name of the key's tenant, which salts its prefix cache and reveals nothing about the key."""
    return blake2b(key.encode(), digest_size=16, person=b"outrider tenant").hexdigest()


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=32, person=b"outrider key").digest()


def _find(digest: bytes, known: list[bytes]) -> bool:
    # All are compared, even after a match.
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
    """Whether a script in a browser sent the request; offered Basic, the browser would ask for the key before it."""
    return headers.get(b"sec-fetch-mode", b"navigate") != b"navigate"
