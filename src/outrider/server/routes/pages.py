"""GET /kv: the state of every KV page, once or as a stream of events; for people to watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from typing import Annotated, Any

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
    "k": "sink",
    "f": "free",
    "c": "cached",
    "h": "held",
    "s": "shared",
    "x": "scratch",
    "p": "pending",
    "q": "quarantined",
}


@router.get("/kv", responses=GENERATES, summary="KV pages: what each is doing, and what the prefix cache gave")
async def kv(request: Request) -> Response:
    service = service_of(request)
    return json_answer(_told(await service.pages(max_age_s=INTERVAL_MS_MIN / 1000), tenant_name(request)))


@router.get("/kv/stream", responses=GENERATES, summary="The same, again and again")
async def kv_stream(
    request: Request, interval_ms: Annotated[int, Query(ge=INTERVAL_MS_MIN, le=INTERVAL_MS_MAX)] = 500
) -> Response:
    service = service_of(request)
    events = _watch(service, tenant_name(request), interval_ms / 1000)
    return EventStream(events, AsyncExitStack(), idle_limit_s=service.config.idle_limit_s)


async def _watch(service: Service, tenant: str, interval_s: float) -> AsyncGenerator[bytes, None]:
    while not service.draining:
        try:
            # Many who watch ask the engine no more often than one does.
            yield event(_told(await service.pages(max_age_s=interval_s / 2), tenant))
        except Problem as problem:
            yield event(problem.body())
        with suppress(TimeoutError):
            await asyncio.wait_for(service.drain_began.wait(), interval_s)


def _told(pages: Pages, tenant: str) -> dict[str, Any]:
    """Pages tell how much everybody keeps; how long prompts are and what was found for them is its tenant's alone."""
    return {
        "step": pages.step,
        "states": STATES,
        "arenas": [
            {"page_bytes": arena.page_bytes, "pages": arena.pages, "runs": arena.states} for arena in pages.arenas
        ],
        "groups": [
            {
                "name": group.name,
                "arena": group.arena,
                "kind": group.kind,
                "page_tokens": group.page_tokens,
                "held": group.held,
                "published": group.published,
            }
            for group in pages.groups
        ],
        "recent_hits": [
            {
                "number": hit.number,
                "age_s": round(hit.age_s, 3),
                "prompt_tokens": hit.prompt_tokens,
                "cached_tokens": hit.cached_tokens,
            }
            for hit in pages.recent_hits.get(tenant, ())
        ],
    }
