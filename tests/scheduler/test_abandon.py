"""Steps that were interrupted: their requests end, all others go on, and no page is lost."""

from __future__ import annotations

import pytest
from tests.kv.fakes import Engine, assert_at_rest, full, ids, make_manager, reference_text, sliding
from tests.scheduler.fakes import METHODS, make_engine

from outrider.kv.retention import Retention
from outrider.scheduler import State


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_only_those_in_the_step_end(method: str, steps: int) -> None:
    engine = make_engine(method, max_num_seqs=2, max_num_batched_tokens=64)
    for number in range(4):
        engine.add(f"r{number}", ids(20, seed=number), max_tokens=12, k=2)
    for _ in range(steps):
        engine.step()
    plan = engine.scheduler.schedule()
    given_up = engine.scheduler.abandon(plan)
    assert set(given_up.ended) == {row.sequence_id for row in plan.scheduled} == {"r0", "r1"}
    assert given_up.quarantined == []
    engine.kv.check_integrity()
    assert not engine.kv.pool.step_in_flight
    engine.run()
    assert set(engine.finished) == {"r2", "r3"}
    for number in (2, 3):
        assert engine.text[f"r{number}"] == reference_text(ids(20, seed=number), 12)
    assert_at_rest(engine.kv)


def test_nothing_of_an_abandoned_step_is_published() -> None:
    engine = make_engine("chain_from_taps")
    engine.add("a", ids(40), max_tokens=12, k=2)
    engine.scheduler.abandon(engine.scheduler.schedule())
    assert all(not index.pages for index in engine.kv.pool.indexes)
    engine.add("a", ids(40), max_tokens=12, k=2)
    engine.step()
    assert engine.scheduler.requests["a"].kv.hit == 0


@pytest.mark.parametrize("ends", ["abort", "abandon"])
def test_a_text_whose_last_step_failed_leaves_no_end(ends: str) -> None:
    """A later request may go on where a text was aborted, but not where it is unknown what a step wrote."""
    kv = make_manager(full(page=8), sliding(8, page=4), retention=Retention.of("tail"), step_tokens=32)
    engine = Engine(kv)
    engine.add("a", ids(16), max_tokens=40)
    for _ in range(20):
        engine.step()
    before = len(kv.pool.indexes[1])
    if ends == "abort":
        engine.scheduler.abort("a")
    else:
        engine.scheduler.abandon(engine.scheduler.schedule())
    assert len(kv.pool.indexes[1]) - before == (3 if ends == "abort" else 0)
    assert_at_rest(kv)


def test_what_the_step_was_to_forget_is_forgotten_by_the_next() -> None:
    engine = make_engine()
    engine.add("a", ids(20), max_tokens=12)
    engine.step()
    engine.scheduler.abort("a")
    plan = engine.scheduler.schedule()
    assert plan.kv.forgotten == ("a",)
    engine.scheduler.abandon(plan)
    assert engine.scheduler.schedule().kv.forgotten == ("a",)


def test_a_fork_without_rows_in_the_step_is_computed_again() -> None:
    """Its page was to be copied in that step, and it is unknown whether it was."""
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=5)
    engine.add("a", ids(13), max_tokens=12, n=3)
    while "a#1" not in engine.scheduler.requests:
        engine.step()
    engine.scheduler.planner.plan_decodes = lambda: None  # type: ignore[method-assign]
    plan = engine.scheduler.schedule()
    del engine.scheduler.planner.plan_decodes
    assert plan.kv.copies
    assert not plan.scheduled
    assert engine.scheduler.abandon(plan).ended == []
    assert {request.state for name, request in engine.scheduler.requests.items() if "#" in name} == {State.WAITING}
    engine.run()
    assert set(engine.finished.values()) == {"length"}
    assert engine.text["a"] == reference_text(ids(13), 12)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("method", METHODS)
def test_when_planning_or_committing_is_interrupted_all_start_over(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(method, max_num_seqs=3, max_num_batched_tokens=64)
    kv, scheduler = engine.kv, engine.scheduler
    for number in range(5):
        engine.add(f"r{number}", ids(20, seed=number), max_tokens=12, k=2)
    engine.step()
    engine.step()
    kept = kv.pool.release

    def half_way(group: int, pages: list[int]) -> None:
        kept(group, pages[:1])
        raise KeyboardInterrupt

    plan = scheduler.schedule()
    verdict = engine._run(plan)
    with monkeypatch.context() as patched:
        # A page is given back, the others and the ledger do not know yet.
        patched.setattr(kv.pool, "release", half_way)
        patched.setattr(kv, "commit", lambda sequence, v, **_options: kv.release(sequence))
        with pytest.raises(KeyboardInterrupt):
            scheduler.commit(plan, verdict)
    ended = set(scheduler.abandon(plan).ended)
    assert ended == {row.sequence_id for row in plan.scheduled}
    assert len(kv.sequences) == len(scheduler.requests) == 5 - len(ended)
    kv.check_integrity()
    with monkeypatch.context() as patched:
        patched.setattr(scheduler.planner, "plan_prefill", half_way)
        with pytest.raises((KeyboardInterrupt, TypeError)):
            scheduler.schedule()
    assert scheduler.abandon(None).ended == []
    engine.run()
    assert set(engine.finished) == {f"r{number}" for number in range(5)} - ended
    for name in engine.finished:
        assert engine.text[name] == reference_text(ids(20, seed=int(name[1:])), 12)
    assert_at_rest(kv)
