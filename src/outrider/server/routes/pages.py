"""The routes GET /kv and /kv/stream: the state of every KV page, once or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.problems import Problem
from outrider.server.front.service import Service
from outrider.server.http.answers import json_answer
from outrider.server.http.event_stream import EventStream, event
from outrider.server.messages import Pages
from outrider.server.routes.documented import GENERATES
from outrider.server.routes.respond import service_of, tenant_name

router = APIRouter()

INTERVAL_MS_MIN, INTERVAL_MS_MAX = 100, 60_000
STATES = {
    "k": "null page",
    "f": "free",
    "c": "cached",
    "h": "held",
    "s": "shared",
    "x": "scratch",
    "p": "pending",
    "q": "quarantined",
}


@router.get("/kv", responses=GENERATES, summary="State of the KV pages, and recent prefix-cache hits")
async def kv(request: Request) -> Response:
    service = service_of(request)
    return json_answer(_as_json(await service.pages(max_age_s=INTERVAL_MS_MIN / 1000), tenant_name(request)))


@router.get("/kv/stream", responses=GENERATES, summary="State of the KV pages, as a stream of events")
async def kv_stream(
    request: Request, interval_ms: Annotated[int, Query(ge=INTERVAL_MS_MIN, le=INTERVAL_MS_MAX)] = 500
) -> Response:
    service = service_of(request)
    events = _watch(service, tenant_name(request), interval_ms / 1000)
    return EventStream(events, AsyncExitStack(), idle_limit_s=service.config.idle_limit_s)


async def _watch(service: Service, tenant: str, interval_s: float) -> AsyncGenerator[bytes, None]:
    while not service.draining:
        try:
            # Several streams together ask the engine no more often than one does.
            yield event(_as_json(await service.pages(max_age_s=interval_s / 2), tenant))
        except Problem as problem:
            yield event(problem.body())
        with suppress(TimeoutError):
            await asyncio.wait_for(service.drain_began.wait(), interval_s)


def _as_json(pages: Pages, tenant: str) -> dict[str, Any]:
    """Returns the state as JSON. Page counts are those of all tenants; prompts and hits only those of this tenant."""
    now_s = time.monotonic()
    return {
        "step": pages.step,
        "states": STATES,
        "arenas": [
            {"page_bytes": arena.page_bytes, "pages": arena.pages, "runs": arena.states} for arena in pages.arenas
        ],
        "groups": [msgspec.structs.asdict(group) for group in pages.groups],
        "recent_hits": [
            {
                "number": hit.number,
                "age_s": round(now_s - hit.at_s, 3),
                "prompt_tokens": hit.prompt_tokens,
                "cached_tokens": hit.cached_tokens,
            }
            for hit in pages.recent_hits.get(tenant, ())
        ],
    }
