"""Who goes first, and who gives way when pages run out."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from tests.kv.fakes import ARCHETYPES_WITH_KV, Engine, assert_at_rest, ids, reference_text
from tests.scheduler.fakes import make_engine

from outrider.scheduler import Request, State


class Preemption(NamedTuple):
    victim: Request
    running: list[Request]
    drafting: bool
    """Did the victim hold draft pages?"""


def note_preemptions(engine: Engine) -> list[Preemption]:
    """Every preemption from now on, as it was decided."""
    roster = engine.scheduler.roster
    noted: list[Preemption] = []
    preempt = roster.preempt

    def note(victim: Request) -> None:
        running = [r for r in roster.requests.values() if r.state in (State.PREFILLING, State.DECODING)]
        noted.append(Preemption(victim, running, victim.kv.drafting))
        preempt(victim)

    roster.preempt = note  # type: ignore[method-assign]
    return noted


# ---- who goes first -------------------------------------------------------------------------------------


def test_requests_are_taken_by_priority_and_then_by_arrival() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=64)
    for id, priority in (("c", 1), ("d", 1), ("a", -1), ("e", 5), ("b", 0)):
        engine.add(id, ids(4, seed=ord(id)), max_tokens=2, priority=priority)
    order = []
    while engine.scheduler.requests:
        order += [update.sequence_id for update in engine.step() if update.finish]
    assert order == ["a", "b", "c", "d", "e"]


def test_preemption_takes_the_last_ranked_request() -> None:
    engine = make_engine(pages=16, max_num_seqs=8, protect_after_preemptions=99)
    noted = note_preemptions(engine)
    for number, priority in enumerate((1, 0, 2, 0, 2, 1)):
        engine.add(f"r{number}", ids(12, seed=number), max_tokens=30, priority=priority)
    engine.run()
    assert len(noted) >= 3
    for victim, running, _drafting in noted:
        assert (victim.spec.priority, victim.arrival) == max((r.spec.priority, r.arrival) for r in running)
    for number in range(6):
        assert engine.text[f"r{number}"] == reference_text(ids(12, seed=number), 30)
    assert_at_rest(engine.kv)


def test_a_request_that_was_preempted_often_is_protected() -> None:
    engine = make_engine(pages=16, max_num_seqs=8, protect_after_preemptions=2)
    noted = note_preemptions(engine)
    for number in range(8):
        engine.add(f"r{number}", ids(12, seed=number), max_tokens=40)
    seen_protected = False
    while engine.scheduler.requests:
        engine.step()
        for request in engine.scheduler.requests.values():
            assert request.protected == (request.preemptions >= 2)
            seen_protected |= request.protected
    assert seen_protected
    for victim, running, _drafting in noted:
        if victim.preemptions > 2:
            # Only another protected request of better rank could take its pages.
            assert any(r.protected and r.arrival < victim.arrival for r in running)


def stream_against_one(engine: Engine, *, steps: int) -> int | None:
    """A high-priority request every third step; how long the low-priority one takes, if it ends."""
    engine.add("low", ids(16, seed=500), max_tokens=30, priority=9)
    for step in range(steps):
        if step % 3 == 0:
            engine.add(f"high{step}", ids(16, seed=step + 1), max_tokens=14, priority=0)
        engine.step()
        if "low" in engine.finished:
            return step
    return None


def test_a_low_priority_request_finishes_under_a_stream_of_high_priority_ones() -> None:
    engine = make_engine(pages=16, max_num_seqs=8, protect_after_preemptions=3)
    assert stream_against_one(engine, steps=400) is not None
    assert engine.text["low"] == reference_text(ids(16, seed=500), 30)


def test_without_protection_that_stream_would_starve_it() -> None:
    """What the test above would not notice if the stream were harmless."""
    engine = make_engine(pages=16, max_num_seqs=8, protect_after_preemptions=10_000)
    assert stream_against_one(engine, steps=400) is None
    assert engine.scheduler.requests["low"].preemptions > 3


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize("step_in_flight", [False, True])
def test_draft_groups_are_dropped_before_anything_is_preempted(method: str, step_in_flight: bool) -> None:
    """One arena for both; the target alone fits, target and drafter together do not."""
    engine = make_engine(method, pages=26, max_num_seqs=8, step_in_flight=step_in_flight, step_tokens=64)
    for number in range(4):
        engine.add(f"r{number}", ids(20, seed=number), max_tokens=20, k=3)
    engine.run()
    assert engine.kv.dropped_drafts > 0
    assert engine.scheduler.num_preemptions == 0
    for number in range(4):
        assert engine.text[f"r{number}"] == reference_text(ids(20, seed=number), 20)


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
def test_no_request_is_preempted_while_it_still_has_draft_pages_there(method: str) -> None:
    engine = make_engine(method, pages=24, max_num_seqs=8)
    noted = note_preemptions(engine)
    for number in range(8):
        engine.add(f"r{number}", ids(20, seed=number), max_tokens=30, k=3)
    engine.run()
    assert noted
    assert not any(preemption.drafting for preemption in noted)


def test_a_full_draft_arena_never_delays_the_target() -> None:
    plain = make_engine("nothing", pages=200, max_num_seqs=8)
    short = make_engine("block_from_taps", slot_bytes=2, pages=(200, 9), max_num_seqs=8)
    for engine, k in ((plain, 0), (short, 3)):
        for number in range(6):
            engine.add(f"r{number}", ids(20, seed=number), max_tokens=10, k=k)
        engine.run()
    assert short.kv.dropped_drafts > 0
    assert short.scheduler.num_preemptions == 0
    assert short.text == plain.text
    # No request waited for draft pages: not one step more than without a drafter.
    assert len(short.plans) <= len(plain.plans)
