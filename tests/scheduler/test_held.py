"""Sequences that are held for a decode worker while steps that were planned ahead go on without them."""

from __future__ import annotations

import pytest
from tests.kv.fakes import ARCHETYPES_WITH_KV, Engine, assert_at_rest, drafter, full, ids, make_manager, sliding

from outrider.kv import Interval
from outrider.scheduler import Role, State, Verdict


def prefill_engine(method: str) -> Engine:
    kv = make_manager(
        full(page=2), sliding(6, page=2), footprint=drafter(method), pages=200, step_tokens=32, steps_ahead=2,
        keep_margin=2,
    )  # fmt: skip
    return Engine(kv, role=Role.PREFILL, step_in_flight=True)


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
def test_a_step_that_was_planned_ahead_adds_nothing_to_what_is_held(method: str) -> None:
    engine = prefill_engine(method)
    engine.add("a", ids(20), max_tokens=12, k=3, hand_over=True)
    while "a" not in engine.finished:
        engine.step()
    engine.drain()
    held = engine.scheduler.requests["a"]
    assert held.state is State.HELD
    assert len(held.tokens) == 21
    assert engine.kv.export_intervals(held.kv)[0] == Interval(0, 20)
    engine.scheduler.release_held("a")
    assert_at_rest(engine.kv)


def test_an_interrupted_step_that_was_planned_ahead_leaves_what_is_held() -> None:
    engine = prefill_engine("chain_from_tokens")
    scheduler = engine.scheduler
    engine.add("a", ids(20), max_tokens=12, k=3, hand_over=True)
    first = scheduler.schedule()
    while not first.scheduled or not first.scheduled[0].samples:
        verdict = Verdict(step=first.step, tokens=((),), proposed=(0,))
        scheduler.commit(first, verdict)
        first = scheduler.schedule()
    ahead = scheduler.schedule()
    assert ahead.kv.assignments, "the step ahead gives the request pages for its next tokens"
    scheduler.commit(first, Verdict(step=first.step, tokens=((7,),), proposed=(0,)))
    assert scheduler.abandon(scheduler.correct(ahead)) == []
    assert scheduler.requests["a"].state is State.HELD
    scheduler.release_held("a")
    assert_at_rest(engine.kv)


def test_a_prompt_whose_kv_was_taken_away_while_its_last_step_ran_is_computed_again() -> None:
    """The step's token is right, but there is nothing to hand over."""
    engine = prefill_engine("chain_from_tokens")
    scheduler = engine.scheduler
    engine.add("a", ids(20), max_tokens=12, k=3, hand_over=True)
    plan = scheduler.schedule()
    assert plan.scheduled[0].samples
    request, verdict = scheduler.requests["a"], engine._run(plan)
    scheduler.roster.preempt(request)
    assert scheduler.commit(plan, verdict) == []
    assert request.state is State.WAITING
    while "a" not in engine.finished:
        engine.step()
    engine.drain()
    assert engine.kv.export_intervals(request.kv)[0] == Interval(0, 20)
