"""Limits on the bodies of requests: size, time, nesting, and strict JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.problems import Problem
from outrider.server.http.answers import problem_answer

CLOSE = {"Connection": "close"}
"""Header of an answer to a request whose body is not read to its end."""
DEPTH_MAX = 64
"""Deepest nesting of lists and objects; code that walks through deeper ones would run out of stack."""


class BodyLimits:
    """ASGI middleware that reads the whole body before the request is handled."""

    def __init__(self, app: Any, bytes_max: int, limit_s: float) -> None:
        self._app = app
        self._bytes_max = bytes_max
        self._limit_s = limit_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            announced = dict(scope["headers"]).get(b"content-length", b"0")
            if announced.isdigit() and int(announced) > self._bytes_max:
                raise self._too_large()
            async with asyncio.timeout(self._limit_s):
                body = await self._read(receive)
        except TimeoutError:
            message = f"the body did not arrive within {self._limit_s:g} s"
            await problem_answer(Problem(message, status=408, code="body_timeout", headers=CLOSE))(scope, receive, send)
            return
        except Problem as problem:
            await problem_answer(problem)(scope, receive, send)
            return
        if body is None:
            return
        handed_over = False

        async def receive_again() -> Any:
            nonlocal handed_over
            if handed_over:
                return await receive()
            handed_over = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send)

    async def _read(self, receive: Any) -> bytes | None:
        """Returns the body; None if the client has disconnected."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._bytes_max:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> Problem:
        return Problem(
            f"the body is larger than {self._bytes_max:,} bytes; send less, or raise --max-body-bytes",
            status=413,
            code="body_too_large",
            headers=CLOSE,
        )


class JsonRequest(Request):
    """A request whose body is strict JSON: no NaN, no invalid UTF-8, no deep nesting."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(f"the body is not valid JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise _too_deep() from None
        if body.count(b"[") + body.count(b"{") > DEPTH_MAX:
            check_depth(value)
        return value


def check_depth(value: object) -> None:
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        if depth > DEPTH_MAX:
            raise _too_deep()
        waiting += [(each, depth + 1) for each in inner if isinstance(each, dict | list)]


def _too_deep() -> Problem:
    return Problem(f"lists and objects may be nested at most {DEPTH_MAX} deep", code="too_deep")


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await original(JsonRequest(request.scope, request.receive))

        return handler
