"""Descriptions of responses for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorObject


_PROBLEMS = {
    400: "The request is wrong; the message says how",
    401: "No valid API key",
    403: "The host or the key is not allowed",
    404: "No such model or route",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full; Retry-After says when to come back",
    500: "The engine failed on this request",
    503: "Loading, restarting or draining; Retry-After says when to come back",
    504: "The request took too long",
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorAnswer} for status, text in _PROBLEMS.items()
}
GENERATES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or events as it is generated",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **PROBLEMS,
}
