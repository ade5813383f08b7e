"""Answers as bytes: JSON, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from outrider.server.front.problems import Problem

to_json = msgspec.json.Encoder().encode


def json_answer(content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status_code=status, media_type="application/json", headers=headers)


def problem_answer(problem: Problem) -> Response:
    return json_answer(problem.body(), status=problem.status, headers=problem.headers)


async def send_problem(problem: Problem, send: Any, *, close: bool = False) -> None:
    """For middleware, which has no response object. `close`: what the client still sends is not read."""
    body = to_json(problem.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    if close:
        headers["connection"] = "close"
    await send(
        {
            "type": "http.response.start",
            "status": problem.status,
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
