"""Exception handlers that answer with OpenAI's error object."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outrider.errors import RequestError
from outrider.server.front.problems import Problem
from outrider.server.http.answers import problem_answer

logger = logging.getLogger("outrider.server")
NO_ROUTE = "there is no such route; /openapi.json lists all routes"


def install(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def problem(_request: Request, error: Problem) -> Response:
        return problem_answer(error)

    @app.exception_handler(RequestError)
    async def refused(_request: Request, error: RequestError) -> Response:
        return problem_answer(Problem(str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return problem_answer(validation_problem(error.errors(), _fields_of(request)))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, Problem):
            return problem_answer(error.__cause__)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        text = NO_ROUTE if error.status_code == 404 else str(error.detail)
        return problem_answer(Problem(text, status=error.status_code, code=code, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _error: Exception) -> Response:
        # The traceback goes to the log, not to the client. The exception reaches the HTTP server, which then closes
        # the connection; the header keeps the client from sending its next request on it.
        return problem_answer(
            Problem(
                "the server failed on this request",
                status=500,
                type="server_error",
                code="internal_error",
                headers={"Connection": "close"},
            )
        )


def _fields_of(request: Request) -> Sequence[str]:
    """Returns the names of the fields in the body of the request's route."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(field, "field_info", None), "annotation", None)
    return list(getattr(model, "model_fields", {}))


def validation_problem(errors: Sequence[Any], fields: Sequence[str]) -> Problem:
    """Returns one sentence about one validation error, with the path of the field."""
    error = _most_telling(errors)
    place = [str(part) for part in error["loc"] if part != "body"]
    # Pydantic puts the types of union members into the path; clients know only fields.
    where = ".".join(
        part for part in place if part != "str" and "[" not in part and "-" not in part and not part[:1].isupper()
    )
    if error["type"] == "extra_forbidden":
        name = place[-1]
        near = get_close_matches(name, fields, n=1, cutoff=0.7) if len(place) == 1 else []
        hint = f"; did you mean {near[0]!r}?" if near else ", so it is refused rather than ignored"
        return Problem(f"{where!r} is not known here{hint}", param=where, code="unknown_field")
    if not where:
        return Problem(
            "the body must be a JSON object, sent with 'Content-Type: application/json'", code="invalid_body"
        )
    if error["type"] == "not_available":
        return Problem(error["msg"], param=where, code="not_available")
    message = error["msg"][:300].replace(" after validation", "")
    return Problem(f"{where}: {message[:1].lower()}{message[1:]}", param=where, code=error["type"])


def _most_telling(errors: Sequence[Any]) -> Any:
    """Returns the error of the union member that matched furthest."""
    return max(errors, key=lambda error: (error["type"] == "extra_forbidden", len(error["loc"])))
