"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.observe.metrics import CONTENT_TYPE
from outrider.server.routes.documented import PROBLEMS
from outrider.server.routes.respond import service_of

router = APIRouter()


@router.get("/metrics", responses=PROBLEMS, summary="For Prometheus")
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})
