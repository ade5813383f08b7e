"""Continuous batching: the row budget, chunks, and a cost that does not grow with the queue."""

from __future__ import annotations

import sys
from random import Random

import pytest
from tests.kv.fakes import assert_at_rest, full, ids, reference_text, rows_of, sliding
from tests.scheduler.fakes import METHODS, make_engine, rows_by_request

from outrider.kv.sizing import worst_case_pages
from outrider.scheduler import State, StepPlan

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
        spent = sum(rows_of(row, engine.kv.layout.footprint) for row in plan.scheduled)
        assert spent <= budget, f"{spent} rows in a step of {budget}"
        assert len(plan.scheduled) <= seats
        assert all(row.num_rows > 0 for row in plan.scheduled)
        assert all(row.num_rows <= max(12, 1 + row.drafts) for row in plan.scheduled)

    engine = make_engine(
        method,
        page=4,
        pages=rng.choice((40, 70)),
        step_in_flight=step_in_flight,
        target=rng.choice([(full(page=4),), (full(page=8), sliding(9, page=4))]),
        step_tokens=12,
        seed=seed,
        inspect=inspect,
        proposes=lambda rng, planned: rng.randint(0, planned) if method == "lookup" else planned,
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


@pytest.mark.parametrize("method", ["nothing", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
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
    engine = make_engine("chain_from_taps", max_num_batched_tokens=33, max_num_seqs=9)
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


def test_a_prompt_behind_a_hit_finds_a_row_for_itself_and_one_for_its_taps() -> None:
    """Four drafting requests would use all but one of the thirteen rows."""
    engine = make_engine("chain_from_taps", max_num_batched_tokens=13, max_num_seqs=5, protect_after_preemptions=9)
    engine.add("cached", ids(24, seed=20), max_tokens=1)
    engine.run()
    for number in range(4):
        engine.add(f"d{number}", ids(1, seed=number), max_tokens=60, k=4)
    while len(engine.text) < 5:
        engine.step()
    engine.add("prompt", ids(20, seed=20) + ids(8, seed=30), max_tokens=2)
    engine.step()
    row = rows_by_request(engine.plans[-1])["prompt"]
    assert (row.start, row.tap_rows) == (20, 1)
    assert row.num_rows >= 1


def test_no_request_is_admitted_without_a_row_to_run() -> None:
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=8)
    engine.add("a", ids(100), max_tokens=1)
    engine.add("b", ids(10, seed=1), max_tokens=1)
    engine.step()
    assert [row.sequence_id for row in engine.plans[-1].scheduled] == ["a"]
    assert engine.scheduler.requests["b"].state is State.WAITING
    engine.run()


# ---- chunked prefill ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_long_prompt_is_computed_in_chunks_without_gap_or_overlap(step_in_flight: bool) -> None:
    engine = make_engine(
        "block_from_taps",
        step_in_flight=step_in_flight,
        max_chunk_tokens=16,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    engine.add("a", ids(100), max_tokens=4, k=2)
    engine.run()
    rows = [row for plan in engine.plans for row in plan.scheduled]
    chunks = [row for row in rows if row.start < 100]
    assert [(row.start, row.num_rows) for row in chunks] == [(16 * n, 16) for n in range(6)] + [(96, 4)]
    assert [row.samples for row in chunks] == [0] * 6 + [1]
    assert [row.propose for row in chunks] == [0] * 6 + [2]


def test_prompts_share_what_the_step_has_left() -> None:
    engine = make_engine(max_num_batched_tokens=32, max_chunk_tokens=24, max_num_seqs=4)
    engine.add("a", ids(40), max_tokens=1)
    engine.add("b", ids(40, seed=1), max_tokens=1)
    engine.step()
    assert {row.sequence_id: row.num_rows for row in engine.plans[0].scheduled} == {"a": 24, "b": 8}
    engine.run()


@pytest.mark.parametrize("shared", [8, 12, 16])
def test_tap_rows_follow_a_hit_and_count_as_rows(shared: int) -> None:
    engine = make_engine("chain_from_taps")
    engine.add("a", ids(24), max_tokens=1)
    engine.run()
    engine.add("b", ids(shared) + ids(9, seed=1), max_tokens=6, k=2)
    engine.step()
    (row,) = engine.plans[-1].scheduled
    assert (row.start, row.num_rows, row.tap_rows, row.draft_end) == (shared, 9, 1, shared - 1)
    engine.step()
    (row,) = engine.plans[-1].scheduled
    assert row.tap_rows == 0
    engine.run()


def test_a_lost_draft_cache_is_rebuilt_in_budgeted_chunks_before_drafting_again() -> None:
    """The target's prefix is cached, the draft model's is not."""
    engine = make_engine("chain_from_tokens", slot_bytes=2, max_num_batched_tokens=20, max_num_seqs=4)
    kv = engine.kv
    engine.add("a", ids(64), max_tokens=1)
    engine.run()
    pages = kv.pool.acquire(1, kv.pool.arena(1).num_available)
    kv.pool.release(1, pages)
    engine.add("b", ids(64), max_tokens=20, k=3)
    fed = []
    while "b" not in engine.finished:
        engine.step()
        (row,) = engine.plans[-1].scheduled
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
    engine = make_engine("block_from_taps", slot_bytes=2, pages=(40, 4))
    engine.add("a", ids(60), max_tokens=10, k=3)
    engine.run()
    assert engine.text["a"] == reference_text(ids(60), 10)
    assert all(row.propose == 0 and row.draft_end == -1 for plan in engine.plans for row in plan.scheduled)


# ---- cost -----------------------------------------------------------------------------------------------


def bytecodes_of_one_schedule(waiting: int) -> int:
    """How many bytecodes one steady schedule() executes, with so many requests in the queue."""
    engine = make_engine("chain_from_taps", max_num_seqs=4, max_num_batched_tokens=64)
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
