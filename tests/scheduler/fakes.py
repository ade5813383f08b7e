"""One way to build the engine of tests/kv/fakes.py for scheduling tests."""

from __future__ import annotations

from typing import Any

from tests.kv.fakes import ARCHETYPES_WITH_KV, Engine, drafter, full, make_manager

from outrider.scheduler import ScheduledRequest, StepPlan

METHODS = ("nothing", "lookup", *ARCHETYPES_WITH_KV)


def make_engine(
    method: str = "nothing",
    *,
    page: int = 8,
    pages: Any = 400,
    step_in_flight: bool = False,
    target: Any = (),
    **more: Any,
) -> Engine:
    of_kv = ("max_model_len", "step_tokens", "prefix_caching", "keep_margin")
    kv_options = {key: more.pop(key) for key in of_kv if key in more}
    draft_options = {key: more.pop(key) for key in ("max_len", "slot_bytes") if key in more}
    kv = make_manager(
        *(target or (full(page=page),)),
        footprint=drafter(method, page=page, **draft_options),
        pages=pages,
        steps_ahead=2 if step_in_flight else 1,
        **({"max_model_len": 4096} | kv_options),
    )
    return Engine(kv, step_in_flight=step_in_flight, **more)


def rows_by_request(plan: StepPlan) -> dict[str, ScheduledRequest]:
    found = {row.sequence_id: row for row in plan.scheduled}
    assert len(found) == len(plan.scheduled), "a request has two rows in one step"
    return found
