"""Verdicts: plans made ahead and corrected, ends inside accepted drafts, and forks."""

from __future__ import annotations

import pytest
from tests.kv.fakes import assert_at_rest, full, ids, next_token, reference_text, sliding
from tests.scheduler.fakes import METHODS, make_engine

# ---- a step in flight -----------------------------------------------------------------------------------


def test_a_plan_made_ahead_is_corrected_by_the_verdict() -> None:
    engine = make_engine("lookup", step_in_flight=True, accepts=lambda rng, drafts: 1, proposes=lambda rng, planned: 2)
    scheduler = engine.scheduler
    engine.add("a", ids(10), max_tokens=60, k=4)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [(row.start, row.num_rows, row.propose) for row in first.scheduled] == [(0, 10, 4)]
    # Planned for the most that the first step can yield: one token and four drafts to verify.
    assert [(row.start, row.num_rows, row.drafts) for row in second.scheduled] == [(10, 5, 4)]
    scheduler.commit(first, engine._run(first))
    second = scheduler.correct(second)
    # Two drafts were found, not four.
    assert [(row.start, row.num_rows, row.drafts, row.proposed) for row in second.scheduled] == [(10, 3, 2, 2)]
    third = scheduler.schedule()
    assert [(row.start, row.num_rows) for row in third.scheduled] == [(13, 5)]
    scheduler.commit(second, engine._run(second))
    third = scheduler.correct(third)
    # One of two accepted: 10 and 11 are durable, the row starts at 12.
    assert [(row.start, row.num_rows, row.drafts) for row in third.scheduled] == [(12, 3, 2)]
    scheduler.commit(third, engine._run(third))
    assert list(scheduler.requests["a"].tokens[10:]) == reference_text(ids(10), 5)


def test_a_plan_for_the_last_owner_of_an_id_is_not_carried_over_to_the_next() -> None:
    engine = make_engine("chain_from_taps", step_in_flight=True)
    scheduler = engine.scheduler
    engine.add("a", ids(10), max_tokens=60, k=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.scheduled
    scheduler.abort("a")
    engine.add("a", ids(20, seed=1), max_tokens=6, k=2)
    assert scheduler.commit(first, engine._run(first)) == []
    second = scheduler.correct(second)
    assert second.scheduled == ()
    assert scheduler.commit(second, engine._run(second)) == []
    engine.run()
    assert engine.text["a"] == reference_text(ids(20, seed=1), 6)
    assert_at_rest(engine.kv)


# ---- ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", range(1, 9))
def test_max_tokens_cuts_accepted_drafts(method: str, count: int) -> None:
    engine = make_engine(method, accepts=lambda rng, drafts: drafts)
    engine.add("a", ids(10), max_tokens=count, k=5)
    engine.run()
    assert engine.text["a"] == reference_text(ids(10), count)
    assert engine.finished["a"] == "length"
    for plan in engine.plans:
        for row in plan.scheduled:
            # One token of those that remain always comes from the target.
            assert not row.propose or row.start + row.num_rows + 1 + row.propose < 10 + count


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_stop_token_among_accepted_drafts_ends_the_text_with_it(place: int, step_in_flight: bool) -> None:
    text = reference_text(ids(10), 30)
    assert text.index(text[place]) == place
    engine = make_engine("chain_from_tokens", accepts=lambda rng, drafts: drafts, step_in_flight=step_in_flight)
    engine.add("a", ids(10), max_tokens=30, k=5, stop_tokens=frozenset({text[place]}))
    engine.run()
    assert engine.text["a"] == text[: place + 1]
    assert engine.finished["a"] == "stop"
    assert_at_rest(engine.kv)


def test_a_stop_token_past_max_tokens_does_not_count() -> None:
    text = reference_text(ids(10), 30)
    engine = make_engine("chain_from_taps", accepts=lambda rng, drafts: drafts)
    engine.add("a", ids(10), max_tokens=3, k=5, stop_tokens=frozenset({text[3]}))
    engine.add("b", ids(10), max_tokens=4, k=5, stop_tokens=frozenset({text[3]}))
    engine.run()
    assert (engine.text["a"], engine.finished["a"]) == (text[:3], "length")
    assert (engine.text["b"], engine.finished["b"]) == (text[:4], "stop")


@pytest.mark.parametrize("method", METHODS)
def test_the_models_limit_ends_the_text(method: str) -> None:
    engine = make_engine(method, max_model_len=20, accepts=lambda rng, drafts: drafts)
    engine.add("a", ids(12), max_tokens=100, k=5)
    engine.run()
    assert engine.text["a"] == reference_text(ids(12), 8)
    for plan in engine.plans:
        for row in plan.scheduled:
            assert row.start + row.num_rows <= 20


# ---- forks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step_in_flight", [False, True])
@pytest.mark.parametrize("seats", [2, 8])
def test_forks_share_the_prompt_and_write_their_own_text(method: str, step_in_flight: bool, seats: int) -> None:
    engine = make_engine(
        method, step_in_flight=step_in_flight, max_num_seqs=seats, target=(full(page=8), sliding(6, page=4))
    )
    engine.add("a", ids(21), max_tokens=10, k=3, n=4)
    engine.run()
    prompt = list(ids(21))
    assert engine.text["a"] == reference_text(prompt, 10)
    for number in (1, 2, 3):
        first = 600 + number
        assert engine.text[f"a#{number}"] == [first, *reference_text([*prompt, first], 9)]
    assert set(engine.finished.values()) == {"length"}
    computed = sum(row.num_rows for plan in engine.plans for row in plan.scheduled if row.start < 21)
    # The prompt was computed once; a fork that had to wait finds it in the cache.
    assert computed <= 21 + 3 * 5
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("method", ["nothing", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
@pytest.mark.parametrize("step_in_flight", [False, True])
def test_forks_survive_a_shortage_of_pages(method: str, step_in_flight: bool) -> None:
    engine = make_engine(method, pages=15, step_in_flight=step_in_flight, max_num_seqs=8, step_tokens=32)
    for name in ("a", "b"):
        engine.add(name, ids(20, seed=ord(name)), max_tokens=12, k=2, n=3)
    engine.run()
    for name in ("a", "b"):
        prompt = list(ids(20, seed=ord(name)))
        assert engine.text[name] == reference_text(prompt, 12)
        for number in (1, 2):
            first = 600 + number
            assert engine.text[f"{name}#{number}"] == [first, *reference_text([*prompt, first], 11)]
    assert_at_rest(engine.kv)


def test_a_fork_that_ends_at_once_and_a_parent_that_does() -> None:
    engine = make_engine("chain_from_taps")
    engine.add("one", ids(10), max_tokens=1, n=3)
    engine.add("stops", ids(10, seed=1), max_tokens=9, n=3, stop_tokens=frozenset({602}))
    first = next_token(list(ids(10, seed=2)))
    engine.add("parent", ids(10, seed=2), max_tokens=5, n=2, stop_tokens=frozenset({first}))
    engine.run()
    assert engine.text["one#2"] == [602]
    assert engine.finished["stops#2"] == "stop"
    assert len(engine.text["stops#1"]) == 9
    assert (engine.text["parent"], engine.finished["parent"]) == ([first], "stop")
    assert len(engine.text["parent#1"]) == 5
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_right_after_the_step_that_forks_leaves_no_page_held(method: str) -> None:
    """The forks' pages were to be copied in the next step, which never comes."""
    engine = make_engine(method)
    engine.add("a", ids(21), max_tokens=10, k=3, n=3)
    while "a#1" not in engine.text:
        engine.step()
    for sequence_id in ("a", "a#1", "a#2"):
        engine.scheduler.abort(sequence_id)
    engine.kv.reset_cache()
    assert all(arena.num_free == arena.num_pages - 1 for arena in engine.kv.pool.arenas)
    engine.kv.check_integrity()
