"""Steps that were interrupted: their requests end, all others go on, and no page is lost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kv.fakes import (
    Engine,
    assert_at_rest,
    full,
    held_pages,
    ids,
    make_manager,
    next_token,
    reference_text,
    sliding,
)
from tests.scheduler.fakes import METHODS, make_engine

from outrider.kv import Interval
from outrider.kv.ledger import Load
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
    ended = engine.scheduler.abandon(plan)
    assert set(ended) == {row.sequence_id for row in plan.scheduled} == {"r0", "r1"}
    assert engine.scheduler.take_given_up() == []
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
    assert engine.scheduler.abandon(plan) == []
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
    ended = set(scheduler.abandon(plan))
    assert ended == {row.sequence_id for row in plan.scheduled}
    assert len(kv.sequences) == len(scheduler.requests) == 5 - len(ended)
    kv.check_integrity()
    with monkeypatch.context() as patched:
        patched.setattr(scheduler.planner, "plan_prefill", half_way)
        with pytest.raises((KeyboardInterrupt, TypeError)):
            scheduler.schedule()
    assert scheduler.abandon(None) == []
    engine.run()
    assert set(engine.finished) == {f"r{number}" for number in range(5)} - ended
    for name in engine.finished:
        assert engine.text[name] == reference_text(ids(20, seed=int(name[1:])), 12)
    assert_at_rest(kv)


# ---- requests whose KV comes from, or goes to, another worker --------------------------------------------

OFFER = {0: Interval(0, 20), 1: Interval(0, 20)}


def hand_overs() -> tuple[Engine, tuple[Load, ...]]:
    """A request in each state of a hand-over, and a plain one that decodes. Returns the loads of the one that loads."""
    engine = make_engine("chain_from_taps", keep_margin=2)
    engine.add("held", ids(20, seed=1), max_tokens=12, k=2, hand_over=True)
    engine.add("plain", ids(20, seed=2), max_tokens=12, k=2)
    engine.add("fetching", ids(20, seed=3), max_tokens=12, k=2, awaits_peer=True)
    engine.add_handed_over("loading", ids(20, seed=4), OFFER, max_tokens=12, k=2)
    engine.step()
    ((_id, loads),) = engine.scheduler.take_loads()
    assert {id: request.state for id, request in engine.scheduler.requests.items()} == {
        "held": State.HELD,
        "plain": State.DECODING,
        "fetching": State.FETCHING,
        "loading": State.LOADING,
    }
    return engine, loads


def awaited(engine: Engine, id: str) -> list[tuple[int, list[int]]]:
    """Every page of a request of which nothing has arrived, as (group, pages)."""
    sequence = engine.scheduler.requests[id].kv
    return [(g, list(held_pages(engine.kv, sequence, g).values())) for g in (0, 1)]


def test_a_step_that_is_given_up_leaves_hand_overs_without_part_in_it_alone() -> None:
    engine, loads = hand_overs()
    scheduler = engine.scheduler
    plan = scheduler.schedule()
    assert scheduler.abandon(plan) == ["plain"]
    assert scheduler.take_given_up() == []
    for load in loads:
        scheduler.load_arrived("loading", load)
    scheduler.fetched("fetching", OFFER, next_token(list(ids(20, seed=3))))
    assert engine.kv.export_intervals(scheduler.requests["held"].kv) == OFFER
    scheduler.release_held("held")
    engine.step()
    for id, more in scheduler.take_loads():
        for load in more:
            scheduler.load_arrived(id, load)
    engine.run()
    for id, seed in (("fetching", 3), ("loading", 4)):
        assert engine.text[id] == reference_text(ids(20, seed=seed), 12)
    assert_at_rest(engine.kv)


def test_a_load_that_a_given_up_step_admitted_ends_and_its_pages_are_put_aside() -> None:
    """The runner may not have been told of its pages, and what loads was perhaps started."""
    engine = make_engine("chain_from_taps")
    scheduler = engine.scheduler
    engine.add_handed_over("a", ids(20), OFFER, max_tokens=12, k=2)
    plan = scheduler.schedule()
    pages = awaited(engine, "a")
    assert all(numbers for _g, numbers in pages)
    assert scheduler.abandon(plan) == ["a"]
    assert scheduler.take_given_up() == [("a", pages)]
    engine.kv.check_integrity()
    engine.kv.restore_quarantined(pages)
    assert_at_rest(engine.kv)


def test_a_request_that_ends_with_its_step_after_it_was_handed_over_is_given_up_too() -> None:
    engine = make_engine("chain_from_taps")
    scheduler = engine.scheduler
    engine.add_handed_over("a", ids(20), OFFER, max_tokens=12, k=2)
    engine.step()
    for load in scheduler.take_loads()[0][1]:
        scheduler.load_arrived("a", load)
    assert scheduler.abandon(scheduler.schedule()) == ["a"]
    assert scheduler.take_given_up() == [("a", [])]
    assert_at_rest(engine.kv)


def break_off(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: Any) -> None:
    """Make the call, and interrupt it where it calls `owner.name`."""

    def interrupt(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_when_all_start_over_what_loads_and_what_is_held_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown which pages hold what. Pages that may still be written to are put aside."""
    engine, loads = hand_overs()
    scheduler = engine.scheduler
    pages = awaited(engine, "loading")
    break_off(monkeypatch, scheduler.planner, "begin", scheduler.schedule)
    assert set(scheduler.abandon(None)) == {"held", "loading"}
    assert sorted(scheduler.take_given_up()) == [("held", []), ("loading", pages)]
    assert scheduler.take_given_up() == []
    engine.kv.check_integrity()
    for load in loads:
        scheduler.load_arrived("loading", load)
    # What is still asked for may be answered, and what ran is computed again.
    scheduler.fetched("fetching", OFFER, None)
    engine.run()
    for id, seed in (("plain", 2), ("fetching", 3)):
        assert engine.text[id] == reference_text(ids(20, seed=seed), 12)
    engine.kv.restore_quarantined(pages)
    assert_at_rest(engine.kv)


def test_when_all_start_over_no_load_is_started_or_settled_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request waited only for a page copy of the step, the loads of another were not started yet."""
    engine = make_engine("chain_from_taps")
    scheduler = engine.scheduler
    engine.add("warm", ids(12) + ids(9, seed=1), max_tokens=1)
    engine.run()
    engine.add_handed_over("settling", ids(20), OFFER, max_tokens=12, k=2)
    settling = scheduler.schedule()
    assert settling.kv.copies
    for load in scheduler.take_loads()[0][1]:
        scheduler.load_arrived("settling", load)
    assert scheduler.num_loading == 1
    break_off(monkeypatch, engine.kv, "complete", lambda: scheduler.commit(settling, engine._run(settling)))
    assert scheduler.abandon(settling) == ["settling"]
    engine.add_handed_over("new", ids(20, seed=1), OFFER, max_tokens=12, k=2)
    plan = scheduler.schedule()
    break_off(monkeypatch, engine.kv, "complete", lambda: scheduler.commit(plan, engine._run(plan)))
    assert scheduler.abandon(plan) == ["new"]
    assert scheduler.take_loads() == []
    aside = engine.take_quarantined()
    engine.add("after", ids(20), max_tokens=12, k=2)
    engine.run()
    assert engine.text["after"] == reference_text(ids(20), 12)
    engine.kv.restore_quarantined(aside)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("call", ["load_arrived", "load_failed", "load_lost", "abort", "release_held"])
def test_the_next_call_repairs_what_an_interrupted_one_left_half_done(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loads = hand_overs()
    scheduler, kv = engine.scheduler, engine.kv
    pages = awaited(engine, "loading")
    calls: dict[str, tuple[Any, str, Any]] = {
        "load_arrived": (kv, "import_interval", lambda: scheduler.load_arrived("loading", loads[0])),
        "load_failed": (kv, "fail_load", lambda: scheduler.load_failed("loading", loads[0])),
        "load_lost": (kv, "abandon_loading", lambda: scheduler.load_lost("loading")),
        "abort": (kv, "close", lambda: scheduler.abort("plain")),
        "release_held": (kv, "close", lambda: scheduler.release_held("held")),
    }
    break_off(monkeypatch, *calls[call])
    scheduler.release_held("unknown")
    # Its caller still waits for it, and learns of its end from the next step.
    assert scheduler.take_updates() == [("loading", (), "failed")]
    # A request that was being finished may have left its lists, and need not be followed any more.
    assert ("loading", pages) in scheduler.take_given_up()
    assert set(scheduler.requests) == {"plain", "fetching"} - ({"plain"} if call == "abort" else set())
    scheduler.abort("plain")
    scheduler.abort("fetching")
    engine.run()
    kv.restore_quarantined(pages)
    assert_at_rest(kv)


@pytest.mark.parametrize("call", ["fetched", "not_fetched"])
@pytest.mark.parametrize("then", ["abandon", "the next call"])
def test_a_request_whose_peers_answer_was_interrupted_ends(
    call: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second answer would come, and it is unknown whether its first token was taken over."""
    engine = make_engine("chain_from_taps")
    scheduler = engine.scheduler
    for id in ("a", "b"):
        engine.add(id, ids(20), max_tokens=12, k=2, awaits_peer=True)
    answers = {
        "fetched": lambda: scheduler.fetched("a", OFFER, next_token(list(ids(20)))),
        "not_fetched": lambda: scheduler.not_fetched("a"),
    }
    break_off(monkeypatch, scheduler.roster, "wait", answers[call])
    if then == "abandon":
        assert scheduler.abandon(None) == ["a"]
    else:
        scheduler.release_held("unknown")
        assert scheduler.take_updates()[-1] == ("a", (), "failed")
    assert scheduler.take_given_up() == [("a", [])]
    # The other's answer has not come yet.
    assert list(scheduler.requests) == ["b"]
    scheduler.not_fetched("b")
    engine.run()
    assert engine.text["b"] == reference_text(ids(20), 12)
    assert_at_rest(engine.kv)
