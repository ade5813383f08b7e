"""POST /admin/…: behind keys of their own."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.http.answers import json_answer
from outrider.server.routes.documented import PROBLEMS
from outrider.server.routes.respond import service_of

router = APIRouter(prefix="/admin")


@router.post("/reset_prefix_cache", responses=PROBLEMS, summary="Forget every cached prompt")
async def reset_prefix_cache(request: Request) -> Response:
    service = service_of(request)
    await service.supervisor.reset_cache()
    return json_answer({"status": "reset"})


@router.post("/drain", responses=PROBLEMS, status_code=202, summary="Finish what runs, then end the server")
async def drain(request: Request) -> Response:
    """The same as SIGTERM."""
    service = service_of(request)
    service.begin_drain()
    return json_answer({"status": "draining", "open_requests": service.supervisor.requests.num_jobs}, status=202)
