"""GET /health, /ready, /version, /v1/models: how the server stands, and what it serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider import __version__
from outrider.server.front.problems import Problem, unavailable
from outrider.server.front.service import Service
from outrider.server.http.answers import json_answer
from outrider.server.routes.documented import PROBLEMS
from outrider.server.routes.respond import service_of

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=PROBLEMS, summary="Is the server alive?")
async def health(request: Request) -> Response:
    """Alive even while the model loads, or loads again; needs no key, and says nothing else. Not if the engine hangs
    and another has not shown life yet: if that lasts, only starting everything again can help."""
    if service_of(request).supervisor.unresponsive:
        raise unavailable("the engine has made no progress for too long; it is being replaced")
    return json_answer({"status": "ok"})


@router.get("/ready", responses=PROBLEMS, summary="Can requests be served now?")
async def ready(request: Request) -> Response:
    service_of(request).check_ready()
    return json_answer({"status": "ready"})


@router.get("/version", responses=PROBLEMS)
async def version(request: Request) -> Response:
    return json_answer({"version": __version__})


@router.get("/v1/models", responses=PROBLEMS, summary="The model that is served, under all its names")
async def models(request: Request) -> Response:
    service = service_of(request)
    return json_answer({"object": "list", "data": [_card(name, service) for name in service.model_names]})


@router.get("/v1/models/{name:path}", responses=PROBLEMS)
async def model(name: str, request: Request) -> Response:
    service = service_of(request)
    if name not in service.model_names:
        raise Problem(f"the model {name[:200]!r} is not served here", status=404, code="model_not_found")
    return json_answer(_card(name, service))


def _card(name: str, service: Service) -> dict[str, Any]:
    facts = service.facts
    return {
        "id": name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "outrider",
        "root": facts.model_name,
        "parent": None,
        "max_model_len": facts.max_model_len,
        "drafter": facts.drafter,
        "num_speculative_tokens": facts.drafts_max,
    }
