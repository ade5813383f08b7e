"""The route GET /speculation: how much the engine speculates just now, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.scheduler.pacing.figures import SOURCES
from outrider.server.http.answers import json_answer
from outrider.server.messages import Speculation
from outrider.server.routes.documented import PROBLEMS
from outrider.server.routes.respond import service_of

router = APIRouter()

MAX_AGE_S = 0.2
"""Viewers who ask more often get the same answer."""


@router.get("/speculation", responses=PROBLEMS, summary="How much is speculated just now, and why")
async def speculation(request: Request) -> Response:
    return json_answer(as_json(await service_of(request).speculation(max_age_s=MAX_AGE_S)))


def as_json(told: Speculation) -> dict[str, Any]:
    """Returns the figures as JSON. They are of all tenants together, and have neither texts nor tokens."""
    counts = told.counts
    return {
        "drafter": told.drafter,
        "num_speculative_tokens": told.drafts_max,
        "chooses": told.choice is not None,
        "choice": None if told.choice is None else asdict(told.choice),
        "costs": told.costs,
        "steps": None
        if counts is None
        else {
            "drafting": counts.drafting_steps,
            "plain": counts.plain_steps,
            "probes": counts.probes,
            "pauses": counts.pauses,
        },
        "sources": None
        if counts is None
        else {
            source: {"offered": offered, "verified": verified, "accepted": accepted}
            for source, offered, verified, accepted in zip(
                SOURCES, counts.offered_by_source, counts.verified_by_source, counts.accepted_by_source, strict=True
            )
        },
        "lookup": None if told.lookup is None else msgspec.structs.asdict(told.lookup),
    }
