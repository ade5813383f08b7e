"""Continuous batching: who runs, with how many rows, who waits, and that the text never depends on it."""

from __future__ import annotations

import sys
from random import Random
from typing import NamedTuple

import pytest
from tests.kv.fakes import (
    METHODS_WITH_KV,
    Engine,
    assert_at_rest,
    drafter,
    full,
    ids,
    make_manager,
    next_token,
    reference_text,
    rows_of,
    sliding,
)

from outrider.kv import NO_DRAFTER, KVFootprint
from outrider.kv.sizing import worst_case_pages
from outrider.scheduler import Request, State, StepPlan

METHODS = ("none", "ngram", *METHODS_WITH_KV)


def footprint_of(method: str, **more) -> KVFootprint:
    return NO_DRAFTER if method == "none" else drafter(method, **more)


def make_engine(
    method: str = "none", *, page: int = 8, pages=400, step_in_flight: bool = False, target=(), **more
) -> Engine:
    kv_options = {key: more.pop(key) for key in ("max_model_len", "step_tokens", "prefix_caching") if key in more}
    draft_options = {key: more.pop(key) for key in ("max_len", "slot_bytes") if key in more}
    kv = make_manager(
        *(target or (full(page=page),)),
        footprint=footprint_of(method, page=page, **draft_options),
        pages=pages,
        steps_ahead=2 if step_in_flight else 1,
        **({"max_model_len": 4096} | kv_options),
    )
    return Engine(kv, step_in_flight=step_in_flight, **more)


def rows_by_request(plan: StepPlan):
    found = {row.request: row for row in plan.rows}
    assert len(found) == len(plan.rows), "a request has two rows in one step"
    return found


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


# ---- the text, the budget and the pages, whatever happens ----------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step_in_flight", [False, True], ids=["at once", "in flight"])
@pytest.mark.parametrize("seed", range(3))
def test_random_workloads_keep_to_the_row_budget_and_to_the_text(method: str, step_in_flight: bool, seed: int) -> None:
    rng = Random(seed)
    budget = rng.choice((17, 40, 64))
    seats = rng.choice((3, 8, 16))

    def inspect(plan: StepPlan) -> None:
        rows_by_request(plan)
        spent = sum(rows_of(row, engine.kv.layout.footprint) for row in plan.rows)
        assert spent <= budget, f"{spent} rows in a step of {budget}"
        assert len(plan.rows) <= seats
        assert all(row.num_rows <= max(12, 1 + row.drafts) for row in plan.rows)

    engine = make_engine(
        method,
        page=4,
        pages=rng.choice((40, 70)),
        step_in_flight=step_in_flight,
        target=rng.choice([(full(page=4),), (full(page=8), sliding(9, page=4))]),
        step_tokens=12,
        seed=seed,
        inspect=inspect,
        proposes=lambda rng, planned: rng.randint(0, planned) if method == "ngram" else planned,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        max_chunk_tokens=12,
    )
    expected, finish = {}, {}
    for number in range(30):
        prompt = ids(rng.choice((0, 4, 8, 13, 30))) + ids(rng.randint(1, 30), seed=rng.randint(1, 5))
        stop = frozenset(rng.sample(range(1, 510), 20))
        count, id = rng.randint(1, 24), f"r{number}"
        engine.add(id, prompt, max_tokens=count, k=rng.randint(0, 4), stop_tokens=stop, priority=rng.randint(0, 2))
        expected[id] = reference_text(prompt, count, stop)
        finish[id] = "stop" if expected[id][-1] in stop else "length"
        for _ in range(rng.randint(0, 3)):
            engine.step()
            engine.kv.check_integrity()
    engine.run()
    assert engine.text == expected
    assert engine.finished == finish
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle", "dflash"])
@pytest.mark.parametrize("step_in_flight", [False, True], ids=["at once", "in flight"])
@pytest.mark.parametrize("window", [None, 6])
def test_whatever_was_admitted_finishes_even_in_the_smallest_arena(
    method: str, step_in_flight: bool, window: int | None
) -> None:
    """Arenas of exactly the worst case of one request, many requests in them."""
    target = (full(page=4),) if window is None else (sliding(window, page=4),)
    options = {"page": 4, "step_in_flight": step_in_flight, "target": target, "step_tokens": 8}
    probe = make_engine(method, **options).kv
    worst = worst_case_pages(probe.layout, probe.config, 36, 3, draft=True)
    engine = make_engine(
        method, **options, pages=tuple(worst), max_num_batched_tokens=24, max_num_seqs=6, max_chunk_tokens=8
    )
    for number in range(8):
        engine.add(f"r{number}", ids(20, seed=number % 3), max_tokens=16, k=3)
    engine.run()
    for number in range(8):
        assert engine.text[f"r{number}"] == reference_text(ids(20, seed=number % 3), 16)
    assert_at_rest(engine.kv)


def test_drafting_rows_count_against_the_budget() -> None:
    """Ten requests that draft three each would need 10 * (1 + 3 + 4) rows."""
    spent = []
    engine = make_engine(
        "dflash",
        inspect=lambda plan: spent.append(sum(rows_of(row, engine.kv.layout.footprint) for row in plan.rows)),
        max_num_batched_tokens=50,
        max_num_seqs=10,
    )
    for number in range(10):
        engine.add(f"r{number}", ids(4, seed=number), max_tokens=30, k=3)
    engine.run()
    assert max(spent) <= 50
    deciding = [plan for plan in engine.plans if len(plan.rows) == 10]
    assert deciding
    assert all(row.propose <= 1 for plan in deciding for row in plan.rows)


def test_a_decoding_request_is_never_left_out_for_a_prompt() -> None:
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=8)
    for number in range(4):
        engine.add(f"d{number}", ids(3, seed=number), max_tokens=40)
    engine.step()
    engine.add("long", ids(200, seed=9), max_tokens=2)
    while "long" not in engine.text:
        engine.step()
        rows = rows_by_request(engine.plans[-1])
        assert {f"d{number}" for number in range(4)} <= rows.keys()
        assert rows["long"].num_rows == 12 or "long" in engine.text


def test_a_prompt_makes_progress_beside_a_full_house_of_drafting_requests() -> None:
    engine = make_engine("eagle", max_num_batched_tokens=33, max_num_seqs=9)
    for number in range(8):
        engine.add(f"d{number}", ids(3, seed=number), max_tokens=60, k=4)
    while len(engine.text) < 8:
        engine.step()
    engine.add("prompt", ids(30, seed=20), max_tokens=2)
    for _ in range(16):
        engine.step()
        assert "prompt" in rows_by_request(engine.plans[-1])
        if "prompt" in engine.text:
            return
    raise AssertionError("the prompt did not get through")


# ---- chunked prefill ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_long_prompt_is_computed_in_chunks_without_gap_or_overlap(step_in_flight: bool) -> None:
    engine = make_engine(
        "dflash",
        step_in_flight=step_in_flight,
        max_chunk_tokens=16,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    engine.add("a", ids(100), max_tokens=4, k=2)
    engine.run()
    rows = [row for plan in engine.plans for row in plan.rows]
    chunks = [row for row in rows if row.start < 100]
    assert [(row.start, row.num_rows) for row in chunks] == [(16 * n, 16) for n in range(6)] + [(96, 4)]
    assert [row.samples for row in chunks] == [0] * 6 + [1]
    assert [row.propose for row in chunks] == [0] * 6 + [2]


def test_a_prompt_with_a_hit_starts_behind_it() -> None:
    engine = make_engine()
    engine.add("a", ids(40), max_tokens=1)
    engine.run()
    engine.add("b", ids(40) + ids(5, seed=1), max_tokens=1)
    engine.run()
    (row,) = engine.plans[-1].rows
    assert (row.start, row.num_rows) == (40, 5)


def test_prompts_share_what_the_step_has_left() -> None:
    engine = make_engine(max_num_batched_tokens=32, max_chunk_tokens=24, max_num_seqs=4)
    engine.add("a", ids(40), max_tokens=1)
    engine.add("b", ids(40, seed=1), max_tokens=1)
    engine.step()
    assert {row.request: row.num_rows for row in engine.plans[0].rows} == {"a": 24, "b": 8}
    engine.run()


@pytest.mark.parametrize("shared", [8, 12, 16])
def test_tap_rows_follow_a_hit_and_count_as_rows(shared: int) -> None:
    engine = make_engine("eagle")
    engine.add("a", ids(24), max_tokens=1)
    engine.run()
    engine.add("b", ids(shared) + ids(9, seed=1), max_tokens=6, k=2)
    engine.step()
    (row,) = engine.plans[-1].rows
    assert (row.start, row.num_rows, row.tap_rows, row.draft_end) == (shared, 9, 1, shared - 1)
    engine.step()
    (row,) = engine.plans[-1].rows
    assert row.tap_rows == 0
    engine.run()


def test_a_lost_draft_cache_is_rebuilt_in_budgeted_chunks_before_drafting_again() -> None:
    """The target's prefix is cached, the draft model's is not."""
    engine = make_engine("draft_model", slot_bytes=2, max_num_batched_tokens=20, max_num_seqs=4)
    kv = engine.kv
    engine.add("a", ids(64), max_tokens=1)
    engine.run()
    pages = kv.pool.acquire(1, kv.pool.arena(1).num_available)
    kv.pool.release(1, pages)
    engine.add("b", ids(64), max_tokens=20, k=3)
    fed = []
    while "b" not in engine.finished:
        engine.step()
        (row,) = engine.plans[-1].rows
        fed.append((row.draft_end, row.feed_to, row.propose))
    assert fed[0][0] == 0
    behind = [entry for entry in fed if entry[1] is not None]
    assert len(behind) >= 3
    assert all(propose == 0 for _end, _to, propose in behind)
    assert [entry[0] for entry in fed] == sorted(entry[0] for entry in fed)
    for (_, feed_to, _), (draft_end, _, _) in zip(behind, fed[1:], strict=False):
        assert draft_end == feed_to
    assert any(propose == 3 for _end, _to, propose in fed)
    assert engine.text["b"] == reference_text(ids(64), 20)


def test_a_request_whose_drafter_can_never_fit_runs_without_it() -> None:
    engine = make_engine("dflash", slot_bytes=2, pages=(40, 4))
    engine.add("a", ids(60), max_tokens=10, k=3)
    engine.run()
    assert engine.text["a"] == reference_text(ids(60), 10)
    assert all(row.propose == 0 and row.draft_end == -1 for plan in engine.plans for row in plan.rows)


# ---- who goes first -------------------------------------------------------------------------------------


def test_requests_are_taken_by_priority_and_then_by_arrival() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=64)
    for id, priority in (("c", 1), ("d", 1), ("a", -1), ("e", 5), ("b", 0)):
        engine.add(id, ids(4, seed=ord(id)), max_tokens=2, priority=priority)
    order = []
    while engine.scheduler.requests:
        order += [update.request for update in engine.step() if update.finish]
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


@pytest.mark.parametrize("method", METHODS_WITH_KV)
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


@pytest.mark.parametrize("method", METHODS_WITH_KV)
def test_nobody_is_preempted_while_it_still_has_draft_pages_there(method: str) -> None:
    engine = make_engine(method, pages=24, max_num_seqs=8)
    noted = note_preemptions(engine)
    for number in range(8):
        engine.add(f"r{number}", ids(20, seed=number), max_tokens=30, k=3)
    engine.run()
    assert noted
    assert not any(preemption.drafting for preemption in noted)


def test_a_full_draft_arena_never_delays_the_target() -> None:
    plain = make_engine("none", pages=200, max_num_seqs=8)
    short = make_engine("dflash", slot_bytes=2, pages=(200, 9), max_num_seqs=8)
    for engine, k in ((plain, 0), (short, 3)):
        for number in range(6):
            engine.add(f"r{number}", ids(20, seed=number), max_tokens=10, k=k)
        engine.run()
    assert short.kv.dropped_drafts > 0
    assert short.scheduler.num_preemptions == 0
    assert short.text == plain.text
    # Nobody waited for draft pages: not one step more than without a drafter.
    assert len(short.plans) <= len(plain.plans)


# ---- a step in flight -----------------------------------------------------------------------------------


def test_a_plan_made_ahead_is_corrected_by_the_verdict() -> None:
    engine = make_engine("ngram", step_in_flight=True, accepts=lambda rng, drafts: 1, proposes=lambda rng, planned: 2)
    scheduler = engine.scheduler
    engine.add("a", ids(10), max_tokens=60, k=4)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [(row.start, row.num_rows, row.propose) for row in first.rows] == [(0, 10, 4)]
    # Planned for the most that the first step can yield: one token and four drafts to verify.
    assert [(row.start, row.num_rows, row.drafts) for row in second.rows] == [(10, 5, 4)]
    scheduler.commit(first, engine._run(first))
    second = scheduler.correct(second)
    # Two drafts were found, not four.
    assert [(row.start, row.num_rows, row.drafts, row.proposed) for row in second.rows] == [(10, 3, 2, 2)]
    third = scheduler.schedule()
    assert [(row.start, row.num_rows) for row in third.rows] == [(13, 5)]
    scheduler.commit(second, engine._run(second))
    third = scheduler.correct(third)
    # One of two accepted: 10 and 11 are durable, the row starts at 12.
    assert [(row.start, row.num_rows, row.drafts) for row in third.rows] == [(12, 3, 2)]
    scheduler.commit(third, engine._run(third))
    assert list(scheduler.requests["a"].tokens[10:]) == reference_text(ids(10), 5)


def test_a_request_that_ended_in_the_step_before_is_taken_out_of_the_plan() -> None:
    engine = make_engine("eagle", step_in_flight=True, accepts=lambda rng, drafts: drafts)
    stop = frozenset(reference_text(ids(10), 3)[2:])
    engine.add("a", ids(10), max_tokens=60, k=4, stop_tokens=stop)
    engine.add("b", ids(10, seed=1), max_tokens=30, k=4)
    engine.run()
    assert engine.text["a"] == reference_text(ids(10), 60, stop)
    assert engine.text["b"] == reference_text(ids(10, seed=1), 30)
    assert engine.finished == {"a": "stop", "b": "length"}
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_pages_of_a_preempted_request_are_not_reused_under_the_step_that_reads_them(method: str) -> None:
    engine = make_engine(method, pages=20, max_num_seqs=8, step_in_flight=True, step_tokens=32)
    for number in range(8):
        engine.add(f"r{number}", ids(14, seed=number), max_tokens=24, k=2)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for number in range(8):
        assert engine.text[f"r{number}"] == reference_text(ids(14, seed=number), 24)
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


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_stop_token_among_accepted_drafts_ends_the_text_with_it(place: int, step_in_flight: bool) -> None:
    text = reference_text(ids(10), 30)
    assert text.index(text[place]) == place
    engine = make_engine("draft_model", accepts=lambda rng, drafts: drafts, step_in_flight=step_in_flight)
    engine.add("a", ids(10), max_tokens=30, k=5, stop_tokens=frozenset({text[place]}))
    engine.run()
    assert engine.text["a"] == text[: place + 1]
    assert engine.finished["a"] == "stop"
    assert_at_rest(engine.kv)


def test_a_stop_token_past_max_tokens_does_not_count() -> None:
    text = reference_text(ids(10), 30)
    engine = make_engine("eagle", accepts=lambda rng, drafts: drafts)
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
        for row in plan.rows:
            assert row.start + row.num_rows <= 20


def test_drafts_are_counted_as_the_target_judged_them() -> None:
    engine = make_engine("eagle", accepts=lambda rng, drafts: min(1, drafts))
    engine.add("a", ids(10), max_tokens=13, k=3)
    engine.run()
    scheduler = engine.scheduler
    verified = [row.drafts for plan in engine.plans for row in plan.rows if row.drafts]
    assert scheduler.num_drafts == len(verified)
    assert scheduler.num_draft_tokens == sum(verified)
    assert scheduler.num_accepted_tokens == len(verified)


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
    computed = sum(row.num_rows for plan in engine.plans for row in plan.rows if row.start < 21)
    # The prompt was computed once; a fork that had to wait finds it in the cache.
    assert computed <= 21 + 3 * 5
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle", "dflash"])
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
    engine = make_engine("eagle")
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


def test_a_forks_name_that_is_taken_does_not_bring_down_the_step() -> None:
    """Somebody else's request may be called like a fork; both must get their text, or one a refusal."""
    engine = make_engine()
    engine.add("a#1", ids(12, seed=3), max_tokens=20)
    engine.step()
    try:
        engine.add("a", ids(10), max_tokens=4, n=2)
    except Exception as refused:
        assert "a#1" in str(refused)  # noqa: PT017
    engine.run()
    assert engine.text["a#1"][:20] == reference_text(ids(12, seed=3), 20)
    assert_at_rest(engine.kv)


# ---- cost -----------------------------------------------------------------------------------------------


def bytecodes_of_one_schedule(waiting: int) -> int:
    """How many bytecodes one steady schedule() executes, with so many requests in the queue."""
    engine = make_engine("eagle", max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(4 + waiting):
        engine.add(f"r{number}", ids(4, seed=number), max_tokens=50, k=2)
    for _ in range(3):
        engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (4, waiting)
    executed = 0

    def trace(frame, event, arg):
        nonlocal executed
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.scheduler.schedule()
    finally:
        sys.settrace(before)
    return executed


def test_a_schedule_costs_the_same_however_many_wait() -> None:
    few, many = bytecodes_of_one_schedule(5), bytecodes_of_one_schedule(3000)
    assert few > 100
    assert many == few


def test_aborted_requests_do_not_pile_up_in_the_queue() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16)
    engine.add("runs", ids(4), max_tokens=1000)
    engine.step()
    for number in range(1000):
        engine.add(f"r{number}", ids(4), max_tokens=4)
        engine.scheduler.abort(f"r{number}")
    assert engine.scheduler.num_waiting == 0
    assert len(engine.scheduler.roster.waiting._heap) < 200
