"""HTTP responses: JSON, and errors as OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from outrider.server.front.problems import Problem

to_json = msgspec.json.Encoder().encode


def json_answer(content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status_code=status, media_type="application/json", headers=headers)


def problem_answer(problem: Problem) -> Response:
    return json_answer(problem.body(), status=problem.status, headers=problem.headers)
