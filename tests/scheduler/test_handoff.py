"""Roles, remote loads and aborts: what is handed over, what is waited for, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from tests.kv.fakes import (
    ARCHETYPES_WITH_KV,
    Engine,
    assert_at_rest,
    drafter,
    everything,
    full,
    ids,
    make_manager,
    next_token,
    reference_text,
    sliding,
)

from outrider.errors import RequestError
from outrider.kv import Interval
from outrider.kv.ledger import Load
from outrider.scheduler import LoadFailure, Role, State


def make_engine(method: str = "chain_from_taps", *, pages: int = 60, step_in_flight: bool = False, **config) -> Engine:
    kv = make_manager(
        full(page=8),
        sliding(6, page=8),
        footprint=drafter(method),
        pages=pages,
        max_model_len=4096,
        step_tokens=32,
        steps_ahead=2 if step_in_flight else 1,
        keep_margin=2 if config.get("role") is Role.PREFILL else 0,
    )
    return Engine(kv, step_in_flight=step_in_flight, **config)


def remote_request(engine: Engine, id: str = "a", length: int = 40, max_tokens: int = 12, **more) -> list[int]:
    """A request whose prompt a prefill worker has computed; returns the whole text to expect."""
    prompt = list(ids(length))
    first = next_token(prompt)
    offer = {g: Interval(0, length) for g in range(3)}
    engine.add(id, [*prompt, first], max_tokens=max_tokens, k=2, remote=offer, prefilled_tokens=1, **more)
    return reference_text(prompt, max_tokens)[1:]


def loads_of(engine: Engine) -> tuple[Load, ...]:
    engine.step()
    ((_id, loads),) = engine.scheduler.take_loads()
    return loads


# ---- the prefill role ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_prefill_worker_feeds_proposes_nothing_and_holds_until_released(method: str, step_in_flight: bool) -> None:
    engine = make_engine(method, role=Role.PREFILL, step_in_flight=step_in_flight, max_chunk_tokens=16, max_num_seqs=8)
    scheduler, kv = engine.scheduler, engine.kv
    engine.add("a", ids(40), max_tokens=20, k=3)
    for _ in range(6):
        engine.step()
    engine.drain()
    assert engine.finished == {"a": "prefilled"}
    assert engine.text["a"] == reference_text(ids(40), 1)
    assert all(row.propose == 0 for plan in engine.plans for row in plan.scheduled)
    request = scheduler.requests["a"]
    assert request.state is State.HELD
    exported = kv.export_intervals(request.kv)
    assert exported[0] == exported[2] == Interval(0, 40)
    assert exported[1].covers(Interval(35, 40))
    # Held: nothing runs for it any more, nothing of it is given away.
    before = [list(state.held()) for state in request.kv.groups]
    engine.step()
    assert engine.plans[-1].scheduled == ()
    assert [list(state.held()) for state in request.kv.groups] == before
    assert not scheduler.has_work
    scheduler.release_held("a")
    scheduler.release_held("a")
    engine.step()
    engine.drain()
    assert_at_rest(kv)


def test_a_request_that_ends_with_its_first_token_is_not_handed_over() -> None:
    engine = make_engine(role=Role.PREFILL)
    first = next_token(list(ids(20)))
    engine.add("one", ids(20), max_tokens=1)
    engine.add("stops", ids(20), max_tokens=9, stop_tokens=frozenset({first}))
    engine.run()
    assert engine.finished == {"one": "length", "stops": "stop"}
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
def test_text_after_a_hand_over_equals_text_of_one_worker(method: str) -> None:
    prefill = make_engine(method, role=Role.PREFILL)
    decode = make_engine(method, role=Role.DECODE)
    prefill.add("a", ids(40), max_tokens=20, k=3)
    while "a" not in prefill.finished:
        prefill.step()
    sender = prefill.scheduler.requests["a"].kv
    decode.add(
        "a",
        sender.tokens,
        max_tokens=20,
        k=3,
        remote=prefill.kv.export_intervals(sender),
        prefilled_tokens=1,
    )
    for load in loads_of(decode):
        decode.scheduler.load_arrived("a", load)
    decode.run()
    assert prefill.text["a"] + decode.text["a"] == reference_text(ids(40), 20)
    first = decode.plans[1].scheduled[0]
    # It starts at the last token, and drafts at once.
    assert (first.start, first.num_rows, first.propose) == (40, 1, 3)


@pytest.mark.parametrize("count", [1, 2])
def test_a_hand_over_with_nothing_left_to_write_adds_nothing(count: int) -> None:
    """The prefill worker's token was the last one that was asked for."""
    engine = make_engine()
    prompt = list(ids(20))
    tokens = prompt + reference_text(prompt, count)
    engine.add("a", tokens, max_tokens=count, prefilled_tokens=count)
    engine.run()
    assert engine.text["a"] == []
    assert engine.finished["a"] == "length"


def test_a_decode_worker_takes_only_what_a_prefill_worker_has_begun() -> None:
    engine = make_engine(role=Role.DECODE)
    with pytest.raises(RequestError, match=r"only decodes.*prefill worker first.*BOTH"):
        engine.add("plain", ids(20))
    expected = remote_request(engine)
    for load in loads_of(engine):
        engine.scheduler.load_failed("a", load)  # recomputed here: what it lost is its work all the same
    engine.run()
    assert engine.text == {"a": expected}


# ---- remote loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_loading_request_waits_while_others_run(step_in_flight: bool) -> None:
    engine = make_engine(step_in_flight=step_in_flight)
    expected = remote_request(engine)
    engine.add("b", ids(20, seed=1), max_tokens=9, k=2)
    engine.step()
    ((_id, loads),) = engine.scheduler.take_loads()
    assert engine.scheduler.num_loading == 1
    assert engine.scheduler.take_loads() == []
    for _ in range(4):
        engine.step()
        assert all(row.sequence_id == "b" for row in engine.plans[-1].scheduled)
    assert engine.text["b"]
    for load in loads:
        engine.scheduler.load_arrived("a", load)
    engine.run()
    assert engine.text["a"] == expected
    assert engine.text["b"] == reference_text(ids(20, seed=1), 9)
    assert_at_rest(engine.kv)


def test_loading_requests_count_against_the_seats() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=64)
    for number in range(3):
        remote_request(engine, f"r{number}", length=16)
    engine.step()
    assert (engine.scheduler.num_loading, engine.scheduler.num_waiting) == (2, 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
def test_any_order_of_arrivals_failures_and_repeats_gives_the_same_text(seed: int, method: str) -> None:
    rng = Random(seed)
    engine = make_engine(method, step_in_flight=bool(seed % 2))
    scheduler = engine.scheduler
    engine.add("warm", ids(20) + ids(9, seed=1), max_tokens=2)
    engine.run()
    expected = remote_request(engine, length=rng.choice((17, 24, 40)))
    events: list[tuple[Callable[[str, Load], None], Load]] = []
    for _ in range(200):
        if "a" in engine.finished:
            break
        for _id, loads in scheduler.take_loads():
            for load in loads:
                event = scheduler.load_failed if rng.random() < 0.4 else scheduler.load_arrived
                events += [(event, load)] * rng.randint(1, 2)
        rng.shuffle(events)
        if events and rng.random() < 0.5:
            event, load = events.pop()
            event("a", load)
            if rng.random() < 0.3:
                event("a", load)
        engine.step()
        engine.kv.check_integrity()
    engine.drain()
    assert engine.text["a"] == expected
    assert_at_rest(engine.kv)


def test_a_failed_target_load_fails_the_request_where_that_is_the_policy() -> None:
    engine = make_engine(load_failure=LoadFailure.FAIL)
    remote_request(engine)
    for load in loads_of(engine):
        (engine.scheduler.load_failed if load.group == 0 else engine.scheduler.load_arrived)("a", load)
    engine.step()
    assert engine.finished == {"a": "failed"}
    assert engine.text["a"] == []
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("policy", list(LoadFailure))
@pytest.mark.parametrize("draft_only", [False, True], ids=["nothing arrived", "the target arrived"])
def test_a_lost_transfer_costs_what_it_did_not_bring_and_its_pages_wait_for_the_handle(
    draft_only: bool, policy: LoadFailure
) -> None:
    engine = make_engine("block_from_taps", load_failure=policy)
    expected = remote_request(engine)
    loads = loads_of(engine)
    for load in loads[:2] if draft_only else ():
        engine.scheduler.load_arrived("a", load)
    aside = engine.scheduler.load_lost("a")
    assert [g for g, _pages in aside] == [load.group for load in loads[2 if draft_only else 0 :]]
    assert engine.scheduler.load_lost("a") == []
    # Late notices of a transfer that was given up change nothing.
    for load in loads:
        engine.scheduler.load_arrived("a", load)
        engine.scheduler.load_failed("a", load)
    engine.run()
    if draft_only or policy is LoadFailure.RECOMPUTE:
        assert engine.text["a"] == expected
        assert any(row.start < 40 for plan in engine.plans for row in plan.scheduled) != draft_only
    else:
        engine.step()
        assert engine.finished == {"a": "failed"}
    engine.kv.check_integrity()
    missing = sum(len(pages) for _g, pages in aside)
    assert [arena.num_available for arena in engine.kv.pool.arenas] == [everything(engine.kv)[0] - missing]
    engine.kv.restore_quarantined(aside)
    assert_at_rest(engine.kv)


class Boaster:
    """A tier that claims to hold everything."""

    def contains(self, group: int, key: bytes) -> bool:
        return True


def test_a_tier_that_boasts_and_fails_delays_a_request_once() -> None:
    engine = Engine(make_manager(full(page=4), tiers=(Boaster(),)))
    engine.add("a", ids(9), max_tokens=3)
    for _ in range(8):
        engine.step()
        for id, loads in engine.scheduler.take_loads():
            for load in loads:
                engine.scheduler.load_failed(id, load)
    assert engine.text["a"] == reference_text(ids(9), 3)


# ---- aborts ----------------------------------------------------------------------------------------------


def until(engine: Engine, state: State, id: str = "a") -> None:
    for _ in range(20):
        request = engine.scheduler.requests[id]
        if request.state is state:
            return
        engine.step()
    raise AssertionError(f"{id} never was {state}")


def waiting(engine: Engine) -> None:
    engine.add("a", ids(40), max_tokens=9, k=3)


def prefilling(engine: Engine) -> None:
    waiting(engine)
    until(engine, State.PREFILLING)


def decoding(engine: Engine) -> None:
    engine.add("a", ids(40), max_tokens=30, k=3)
    until(engine, State.DECODING)
    engine.step()


def with_a_copy_planned(engine: Engine) -> None:
    engine.add("first", ids(40), max_tokens=1)
    engine.run()
    engine.add("a", ids(37), max_tokens=9, k=3)
    until(engine, State.DECODING)


def forked(engine: Engine) -> None:
    engine.add("a", ids(37), max_tokens=9, k=3, n=3)
    while "a#2" not in engine.scheduler.requests:
        engine.step()
    engine.scheduler.abort("a#1")
    engine.scheduler.abort("a#2")


def preempted(engine: Engine) -> None:
    engine.add("a", ids(10), max_tokens=90, k=2, priority=5)
    engine.step()
    number = 0
    while not engine.scheduler.requests["a"].preemptions:
        engine.add(f"r{number}", ids(30, seed=number + 1), max_tokens=40, k=2)
        engine.step()
        number += 1
    assert engine.scheduler.requests["a"].state is State.WAITING
    for other in range(number):
        engine.scheduler.abort(f"r{other}")


def loading(engine: Engine) -> None:
    engine.add("first", ids(20), max_tokens=1)
    engine.run()
    remote_request(engine)
    until(engine, State.LOADING)


def partly_loaded(engine: Engine) -> None:
    remote_request(engine)
    until(engine, State.LOADING)
    ((_id, loads),) = engine.scheduler.take_loads()
    engine.scheduler.load_arrived("a", loads[0])
    engine.scheduler.load_failed("a", loads[1])


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize("step_in_flight", [False, True], ids=["at once", "in flight"])
@pytest.mark.parametrize(
    "reach",
    [waiting, prefilling, decoding, with_a_copy_planned, forked, preempted, loading, partly_loaded],
    ids=lambda reach: reach.__name__,
)
def test_an_abort_in_any_state_leaves_no_page_behind(method: str, step_in_flight: bool, reach) -> None:
    engine = make_engine(
        method,
        pages=48,
        step_in_flight=step_in_flight,
        max_chunk_tokens=16,
        max_num_seqs=12,
        max_num_batched_tokens=64,
    )
    reach(engine)
    aside = engine.scheduler.abort("a")
    engine.kv.check_integrity()
    assert engine.scheduler.abort("a") == []
    assert "a" not in engine.scheduler.requests
    if reach in (loading, partly_loaded):
        assert aside
    engine.step()
    engine.drain()
    engine.kv.check_integrity()
    engine.kv.restore_quarantined(aside)
    engine.add("after", ids(40), max_tokens=5, k=3)
    engine.run()
    assert engine.text["after"] == reference_text(ids(40), 5)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_an_abort_of_a_held_request_lets_it_go(step_in_flight: bool) -> None:
    engine = make_engine(role=Role.PREFILL, step_in_flight=step_in_flight)
    engine.add("a", ids(40), max_tokens=9)
    until(engine, State.HELD)
    assert engine.scheduler.abort("a") == []
    engine.step()
    engine.drain()
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step_in_flight", [False, True], ids=["at once", "in flight"])
def test_random_aborts_disturb_no_other_request(seed: int, step_in_flight: bool) -> None:
    rng = Random(seed)
    method = rng.choice(ARCHETYPES_WITH_KV)
    engine = make_engine(
        method, pages=40, step_in_flight=step_in_flight, max_num_seqs=8, max_num_batched_tokens=48, max_chunk_tokens=20
    )
    prompts, gone, aside = {}, set(), []
    for number in range(40):
        id = f"r{number}"
        prompts[id] = ids(rng.choice((0, 8, 20))) + ids(rng.randint(1, 20), seed=number)
        if rng.random() < 0.2:
            offer = {g: Interval(0, len(prompts[id]) - 1) for g in range(3)}
            engine.add(id, prompts[id], max_tokens=10, k=2, remote=offer)
        else:
            engine.add(id, prompts[id], max_tokens=10, k=2)
        for _ in range(rng.randint(0, 3)):
            engine.step()
            for loading_id, loads in engine.scheduler.take_loads():
                for load in loads:
                    engine.scheduler.load_arrived(loading_id, load)
        if rng.random() < 0.4 and engine.scheduler.requests:
            victim = rng.choice(sorted(engine.scheduler.requests))
            gone.add(victim)
            aside += engine.scheduler.abort(victim)
            engine.kv.check_integrity()
    for _ in range(300):
        engine.step()
        for loading_id, loads in engine.scheduler.take_loads():
            for load in loads:
                engine.scheduler.load_arrived(loading_id, load)
    engine.run()
    for id in prompts.keys() - gone:
        assert engine.text[id] == reference_text(prompts[id], 10), id
    engine.kv.restore_quarantined(aside)
    assert_at_rest(engine.kv)
