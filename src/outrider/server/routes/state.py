"""Routes about the server itself: GET /health, /ready, /version, /v1/models, /metrics and /kv_transfer; POST /admin/…,
which need an admin key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider import __version__
from outrider.server.front.problems import Problem, unavailable
from outrider.server.front.service import Service
from outrider.server.http.answers import json_answer
from outrider.server.observe.metrics import CONTENT_TYPE
from outrider.server.routes.documented import PROBLEMS
from outrider.server.routes.respond import service_of

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=PROBLEMS, summary="Is the server alive?")
async def health(request: Request) -> Response:
    """Succeeds while the model is loaded or the engine restarted, and needs no key. Fails if the engine hung and
    no other has made progress yet; if that lasts, the server must be restarted."""
    if service_of(request).supervisor.unresponsive:
        raise unavailable("the engine has made no progress for too long; it is being restarted")
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


@router.get("/metrics", responses=PROBLEMS, summary="Metrics for Prometheus")
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/kv_transfer", responses=PROBLEMS, summary="This worker's part in prefill/decode disaggregation")
async def kv_transfer(request: Request) -> Response:
    """What a proxy and `outrider doctor --peer` must know: role, endpoint, what must be equal on both workers, and
    counters since the engine process started."""
    service = service_of(request)
    facts = service.facts.transfer
    if facts is None:
        raise Problem(
            "this server exchanges no KV with other workers; start it with --kv-transfer-config and --cluster-key",
            status=404,
            code="kv_transfer_not_configured",
        )
    now = await service.supervisor.transfers()
    return json_answer(
        {
            "role": facts.role,
            "connector": facts.connector,
            "load_failure_policy": facts.load_failure_policy,
            "endpoint": facts.endpoint,
            "engine_id": facts.engine,
            "transport": now.transport,
            "protocol": facts.protocol,
            "layout_digest": facts.layout_digest,
            "lease_s": facts.lease_s,
            "held_pages": now.counters["held_pages"],
            "leases": now.counters["leases"],
            "counters": {name: count for name, count in now.counters.items() if name not in ("held_pages", "leases")},
        }
    )


@router.post("/admin/reset_prefix_cache", responses=PROBLEMS, summary="Forget every cached prompt")
async def reset_prefix_cache(request: Request) -> Response:
    await service_of(request).supervisor.reset_cache()
    return json_answer({"status": "reset"})


@router.post(
    "/admin/drain", responses=PROBLEMS, status_code=202, summary="Finish running requests, then end the server"
)
async def drain(request: Request) -> Response:
    """Does the same as SIGTERM."""
    service = service_of(request)
    service.begin_drain()
    return json_answer({"status": "draining", "open_requests": service.supervisor.requests.num_jobs}, status=202)


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
        "chooses_drafts": facts.chooses_drafts,
    }
