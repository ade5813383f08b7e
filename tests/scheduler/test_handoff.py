"""Roles, hand-overs, loads and aborts: what is handed over, what is waited for, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from tests.kv.fakes import (
    ARCHETYPES_WITH_KV,
    Engine,
    assert_at_rest,
    available,
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
from outrider.kv.intervals import page_count
from outrider.kv.ledger import Load, LoadState
from outrider.scheduler import LoadFailure, Request, Role, State

ALL_GROUPS = (0, 1, 2)


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


def offer(length: int) -> dict[int, Interval]:
    """What a prefill worker holds of a prompt of this length."""
    return {g: Interval(0, length) for g in ALL_GROUPS}


def handed_over(
    engine: Engine, id: str = "a", length: int = 40, max_tokens: int = 12, drafts: int = 0, **more
) -> list[int]:
    """Add a request whose prompt a prefill worker has computed; returns the whole text to expect."""
    more = {"k": 2} | more
    engine.add_handed_over(id, ids(length), offer(length), drafts=drafts, max_tokens=max_tokens, **more)
    return reference_text(ids(length), max_tokens)


def loads_of(engine: Engine) -> tuple[Load, ...]:
    engine.step()
    ((_id, loads),) = engine.scheduler.take_loads()
    return loads


def prefilled(engine: Engine, id: str = "a") -> Request:
    """Step until the request is held for a decode worker."""
    for _ in range(20):
        if id in engine.finished:
            break
        engine.step()
    engine.drain()
    assert engine.finished[id] == "prefilled"
    request = engine.scheduler.requests[id]
    assert request.state is State.HELD
    return request


# ---- the prefill role ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_prefill_worker_proposes_once_and_holds_until_released(method: str, step_in_flight: bool) -> None:
    engine = make_engine(method, role=Role.PREFILL, step_in_flight=step_in_flight, max_chunk_tokens=16, max_num_seqs=8)
    scheduler, kv = engine.scheduler, engine.kv
    engine.add("a", ids(40), max_tokens=20, k=3, hand_over=True)
    request = prefilled(engine)
    assert engine.text["a"] == reference_text(ids(40), 1)
    rows = [row for plan in engine.plans for row in plan.scheduled]
    # The last chunk proposes what the decode worker will verify.
    assert [(row.start, row.num_rows, row.propose) for row in rows] == [(0, 16, 0), (16, 16, 0), (32, 8, 3)]
    assert request.drafts == 3
    exported = kv.export_intervals(request.kv)
    assert exported[0] == exported[2] == Interval(0, 40)
    assert exported[1].covers(Interval(35, 40))
    # Held: nothing runs for it any more, nothing of it is given away.
    before = [list(state.held()) for state in request.kv.groups]
    engine.step()
    assert engine.plans[-1].scheduled == ()
    assert [list(state.held()) for state in request.kv.groups] == before
    assert not scheduler.has_work
    assert scheduler.take_given_up() == []
    scheduler.release_held("a")
    scheduler.release_held("a")
    engine.step()
    engine.drain()
    # It came to its end, so there is nothing to withdraw.
    assert scheduler.take_given_up() == []
    assert_at_rest(kv)


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_hand_over_is_held_whatever_its_first_token_is(step_in_flight: bool) -> None:
    """The decode worker ends the text by itself, and proxies ask a prefill worker for one token only."""
    engine = make_engine(role=Role.PREFILL, step_in_flight=step_in_flight)
    first = next_token(list(ids(20)))
    engine.add("one", ids(20), max_tokens=1, k=2, hand_over=True)
    engine.add("stops", ids(20), max_tokens=9, k=2, stop_tokens=frozenset({first}), hand_over=True)
    for id in ("one", "stops"):
        request = prefilled(engine, id)
        assert engine.text[id] == [first]
        # How much may follow is for the decode worker to know.
        assert request.drafts == 2
        assert engine.kv.export_intervals(request.kv)[0] == Interval(0, 20)
        engine.scheduler.release_held(id)
    engine.step()
    engine.drain()
    assert_at_rest(engine.kv)


def test_a_plain_request_on_a_prefill_worker_runs_to_its_end() -> None:
    engine = make_engine(role=Role.PREFILL)
    third = reference_text(ids(20), 3)[-1]
    engine.add("plain", ids(20), max_tokens=9, k=2)
    engine.add("stops", ids(20), max_tokens=9, k=2, stop_tokens=frozenset({third}))
    engine.run()
    assert engine.finished == {"plain": "length", "stops": "stop"}
    assert engine.text == {"plain": reference_text(ids(20), 9), "stops": reference_text(ids(20), 3)}
    assert_at_rest(engine.kv)


def test_only_a_held_request_can_be_released() -> None:
    engine = make_engine(role=Role.PREFILL)
    engine.add("a", ids(40), max_tokens=9, hand_over=True)
    engine.scheduler.release_held("a")
    engine.scheduler.release_held("unknown")
    prefilled(engine)


# ---- the decode role -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
def test_text_after_a_hand_over_equals_text_of_one_worker(method: str, drafts: int) -> None:
    """The decode worker starts at the last token, verifies the drafts that came with it, and drafts at once."""
    prefill = make_engine(method, role=Role.PREFILL, proposes=lambda _rng, planned: min(planned, drafts))
    decode = make_engine(method, role=Role.DECODE)
    prefill.add("a", ids(40), max_tokens=20, k=3, hand_over=True)
    held = prefilled(prefill)
    assert held.drafts == drafts
    remote = prefill.kv.export_intervals(held.kv)
    decode.add_handed_over("a", ids(40), remote, drafts=held.drafts, max_tokens=20, k=3)
    for load in loads_of(decode):
        decode.scheduler.load_arrived("a", load)
    decode.run()
    assert prefill.text["a"] == decode.text["a"][:1]
    assert decode.text["a"] == reference_text(ids(40), 20)
    first, second = (decode.plans[number].scheduled[0] for number in (1, 2))
    assert (first.start, first.num_rows, first.drafts, first.propose) == (40, 1 + drafts, drafts, 3)
    assert second.drafts == 3
    assert_at_rest(decode.kv)


def test_drafts_that_came_along_are_verified_once() -> None:
    """A request that is preempted later, and finds all of its KV in the cache, has no drafts any more."""
    engine = Engine(make_manager(full(page=8)), accepts=lambda _rng, _drafts: 0, proposes=lambda _rng, _planned: 0)
    engine.add_handed_over("a", ids(16), {0: Interval(0, 16)}, drafts=2, max_tokens=20, k=2)
    for load in loads_of(engine):
        engine.scheduler.load_arrived("a", load)
    request = engine.scheduler.requests["a"]
    while request.kv.committed < 24:
        engine.step()
    engine.scheduler.roster.preempt(request)
    engine.run()
    first, *_rest, again = [row for plan in engine.plans for row in plan.scheduled if row.start in (16, 24)]
    assert (first.start, first.drafts) == (16, 2)
    assert (again.start, again.drafts) == (24, 0)
    assert engine.text["a"] == reference_text(ids(16), 20)


def test_without_the_first_token_a_request_samples_it_from_the_prompts_last_row() -> None:
    engine = make_engine(role=Role.DECODE, max_num_seqs=2)
    engine.add("a", ids(40), max_tokens=9, k=2, n=3, awaits_peer=True)
    engine.scheduler.fetched("a", offer(40), None)
    assert engine.scheduler.take_updates() == []
    loads = loads_of(engine)
    assert {load.group: load.interval.end for load in loads} == dict.fromkeys(ALL_GROUPS, 39)
    for load in loads:
        engine.scheduler.load_arrived("a", load)
    engine.run()
    (first,) = engine.plans[1].scheduled
    assert (first.start, first.num_rows, first.samples) == (39, 1, 3)
    assert engine.text["a"] == reference_text(ids(40), 9)
    # The forks start from the prompt here, not from a peer, and so does the one that had to wait for a seat.
    assert set(engine.finished) == {"a", "a#1", "a#2"}
    assert engine.scheduler.take_loads() == []
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("ended_by", ["length", "stop"])
def test_a_first_token_that_is_the_last_one_needs_no_kv(ended_by: str) -> None:
    engine = make_engine(role=Role.DECODE)
    first = next_token(list(ids(20)))
    ends = {"max_tokens": 1} if ended_by == "length" else {"stop_tokens": frozenset({first})}
    engine.add_handed_over("a", ids(20), offer(20), drafts=2, **ends)
    assert not engine.scheduler.has_work
    engine.run()
    engine.step()
    assert engine.text == {"a": [first]}
    assert engine.finished == {"a": ended_by}
    assert engine.scheduler.take_loads() == []
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_request_is_fetched_while_others_run_and_holds_nothing(step_in_flight: bool) -> None:
    engine = make_engine(role=Role.DECODE, step_in_flight=step_in_flight)
    scheduler = engine.scheduler
    engine.add("a", ids(40), max_tokens=12, k=2, awaits_peer=True)
    assert scheduler.requests["a"].state is State.FETCHING
    assert scheduler.has_work
    assert scheduler.only_loading
    engine.add("b", ids(20, seed=1), max_tokens=9, k=2)
    assert not scheduler.only_loading
    while "b" not in engine.finished:
        engine.step()
        assert all(row.sequence_id == "b" for row in engine.plans[-1].scheduled)
    assert scheduler.only_loading
    assert not scheduler.requests["a"].kv.admitted
    assert engine.text == {"b": reference_text(ids(20, seed=1), 9)}
    scheduler.fetched("a", offer(40), next_token(list(ids(40))))
    # Only the first answer counts.
    scheduler.fetched("a", offer(40), 7)
    scheduler.fetched("unknown", offer(40), 7)
    scheduler.not_fetched("unknown")
    assert scheduler.requests["a"].state is State.WAITING
    while not (started := scheduler.take_loads()):
        engine.step()
    for load in started[0][1]:
        scheduler.load_arrived("a", load)
    engine.run()
    assert engine.text["a"] == reference_text(ids(40), 12)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("policy", list(LoadFailure))
def test_a_prompt_that_no_peer_holds_is_computed_here_or_fails(policy: LoadFailure) -> None:
    engine = make_engine(role=Role.DECODE, load_failure=policy)
    engine.add("a", ids(40), max_tokens=12, k=2, awaits_peer=True)
    engine.scheduler.not_fetched("a")
    if policy is LoadFailure.FAIL:
        engine.step()
        assert engine.finished == {"a": "failed"}
        assert engine.text["a"] == []
    engine.run()
    if policy is LoadFailure.RECOMPUTE:
        assert engine.text["a"] == reference_text(ids(40), 12)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("policy", list(LoadFailure))
def test_a_request_that_cannot_wait_for_its_peer_any_longer_is_computed_here_or_fails(policy: LoadFailure) -> None:
    """Its first token has been told already; the drafts after it are made anew."""
    engine = make_engine(role=Role.DECODE, load_failure=policy)
    expected = handed_over(engine, drafts=2)
    engine.scheduler.not_fetched("a")
    if policy is LoadFailure.FAIL:
        engine.step()
        assert engine.finished == {"a": "failed"}
        assert engine.text["a"] == expected[:1]
    else:
        engine.run()
        assert engine.text["a"] == expected
        (row,) = engine.plans[0].scheduled
        assert (row.start, row.drafts) == (0, 0)
    assert engine.scheduler.take_loads() == []
    assert engine.take_quarantined() == []
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("call", ["not_fetched", "fetched"])
def test_an_answer_that_comes_after_the_loads_have_begun_changes_nothing(call: str) -> None:
    engine = make_engine(role=Role.DECODE)
    expected = handed_over(engine)
    loads = loads_of(engine)
    if call == "fetched":
        engine.scheduler.fetched("a", offer(40), 7)
    else:
        engine.scheduler.not_fetched("a")
    for load in loads:
        engine.scheduler.load_arrived("a", load)
    engine.run()
    assert engine.text["a"] == expected
    assert engine.plans[1].scheduled[0].start == 40


def test_what_the_index_held_is_used_when_a_transfer_that_replaced_it_fails() -> None:
    """The window before the transfer's end reaches past the hit, so the request gave the hit's window up."""
    engine = make_engine(role=Role.DECODE)
    engine.add("warm", ids(24) + ids(9, seed=1), max_tokens=1)
    engine.run()
    expected = handed_over(engine)
    loads = loads_of(engine)
    assert {load.group: load.interval.start for load in loads}[0] == 24
    for load in loads:
        engine.scheduler.load_failed("a", load)
    engine.run()
    assert engine.text["a"] == expected
    first = next(row for plan in engine.plans for row in plan.scheduled if row.sequence_id == "a")
    assert first.start == 24
    assert_at_rest(engine.kv)


def test_plain_prompts_on_a_decode_worker_follow_the_policy() -> None:
    """A proxy sends a plain prompt when its prefill worker has failed."""
    computes = make_engine(role=Role.DECODE)
    computes.add("plain", ids(20), max_tokens=9)
    computes.run()
    assert computes.text["plain"] == reference_text(ids(20), 9)
    refuses = make_engine(role=Role.DECODE, load_failure=LoadFailure.FAIL)
    with pytest.raises(RequestError, match=r"'plain'.*computes no prompts.*prefill worker first.*recompute"):
        refuses.add("plain", ids(20))
    assert refuses.scheduler.requests == {}
    # The policy alone makes no decode worker.
    both = make_engine(load_failure=LoadFailure.FAIL)
    both.add("plain", ids(20), max_tokens=9)
    both.run()
    assert both.text["plain"] == reference_text(ids(20), 9)


def test_each_role_refuses_what_another_worker_must_do() -> None:
    prefill, decode, single = (make_engine(role=role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))
    with pytest.raises(RequestError, match=r"'a'.*only computes prompts.*decode worker"):
        prefill.add("a", ids(20), awaits_peer=True)
    for engine in (decode, single):  # the single worker keeps no margin behind its windows
        with pytest.raises(RequestError, match=r"'a'.*hands nothing over.*prefill worker"):
            engine.add("a", ids(20), hand_over=True)
    for engine in (prefill, decode, single):
        assert engine.scheduler.requests == {}
        assert engine.kv.sequences == {}


# ---- loads from a peer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_a_loading_request_waits_while_others_run(step_in_flight: bool) -> None:
    engine = make_engine(step_in_flight=step_in_flight)
    expected = handed_over(engine)
    engine.add("b", ids(20, seed=1), max_tokens=9, k=2)
    engine.step()
    ((_id, loads),) = engine.scheduler.take_loads()
    assert engine.scheduler.num_loading == 1
    assert engine.scheduler.take_loads() == []
    for _ in range(4):
        engine.step()
        assert all(row.sequence_id == "b" for row in engine.plans[-1].scheduled)
    assert engine.text["a"] == expected[:1]
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
        handed_over(engine, f"r{number}", length=16)
    engine.step()
    assert (engine.scheduler.num_loading, engine.scheduler.num_waiting) == (2, 1)
    assert [id for id, _loads in engine.scheduler.take_loads()] == ["r0", "r1"]


def test_an_offer_that_is_too_short_is_left_alone() -> None:
    engine = make_engine()
    engine.add_handed_over("a", ids(40), offer(32), drafts=2, max_tokens=12, k=2)
    engine.run()
    assert engine.scheduler.take_loads() == []
    assert engine.text["a"] == reference_text(ids(40), 12)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
def test_any_order_of_arrivals_failures_and_repeats_gives_the_same_text(seed: int, method: str) -> None:
    rng = Random(seed)
    engine = make_engine(method, step_in_flight=bool(seed % 2))
    scheduler = engine.scheduler
    engine.add("warm", ids(20) + ids(9, seed=1), max_tokens=2)
    engine.run()
    expected = handed_over(engine, length=rng.choice((17, 24, 40)), drafts=rng.randint(0, 2))
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
    # Every load ended by itself, so no page had to be put aside.
    assert scheduler.take_given_up() == []
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("policy", list(LoadFailure))
@pytest.mark.parametrize("failed", ALL_GROUPS)
def test_a_failed_load_of_the_target_fails_the_request_where_that_is_the_policy(
    failed: int, policy: LoadFailure
) -> None:
    """A drafter's KV never decides: without it the request only drafts worse."""
    engine = make_engine(load_failure=policy)
    expected = handed_over(engine, drafts=2)
    for load in loads_of(engine):
        (engine.scheduler.load_failed if load.group == failed else engine.scheduler.load_arrived)("a", load)
    if policy is LoadFailure.FAIL and failed != 2:
        engine.step()
        assert engine.finished == {"a": "failed"}
        assert engine.text["a"] == expected[:1]
    else:
        engine.run()
        assert engine.text["a"] == expected
        first = engine.plans[1].scheduled[0]
        # Drafts are verified by the first step only if that starts at the last token.
        assert (first.start, first.drafts) == ((40, 2) if failed == 2 else (0, 0))
    assert engine.take_quarantined() == []
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("policy", list(LoadFailure))
@pytest.mark.parametrize("draft_only", [False, True], ids=["nothing arrived", "the target arrived"])
def test_a_lost_transfer_costs_what_it_did_not_bring_and_its_pages_wait_for_the_handle(
    draft_only: bool, policy: LoadFailure
) -> None:
    engine = make_engine("block_from_taps", load_failure=policy)
    expected = handed_over(engine, drafts=2)
    loads = loads_of(engine)
    for load in loads[:2] if draft_only else ():
        engine.scheduler.load_arrived("a", load)
    assert engine.scheduler.take_given_up() == []
    pages = pages_of(engine, loads[2 if draft_only else 0 :])
    engine.scheduler.load_lost("a")
    given_up = engine.scheduler.take_given_up()
    assert {each.sequence_id for each in given_up} == {"a"}
    aside = [part for each in given_up for part in each.quarantined]
    assert aside == pages
    engine.scheduler.load_lost("a")
    assert engine.scheduler.take_given_up() == []
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
        assert engine.text["a"] == expected[:1]
    assert engine.scheduler.take_given_up() == []
    engine.kv.check_integrity()
    assert available(engine.kv) == [everything(engine.kv)[0] - sum(len(numbers) for _g, numbers in pages)]
    engine.kv.restore_quarantined(aside)
    assert_at_rest(engine.kv)


def pages_of(engine: Engine, loads: tuple[Load, ...], id: str = "a") -> list[tuple[int, list[int]]]:
    """The pages, per load, that a transfer writes to."""
    groups = engine.scheduler.requests[id].kv.groups
    return [
        (load.group, groups[load.group].pages[load.interval.start // 8 : page_count(load.interval.end, 8)])
        for load in loads
    ]


# ---- loads from a tier -----------------------------------------------------------------------------------


class Boaster:
    """A tier that claims to hold everything."""

    def contains(self, group: int, key: bytes) -> bool:
        return True


@pytest.mark.parametrize("policy", list(LoadFailure))
def test_a_tier_that_boasts_and_fails_delays_a_request_once(policy: LoadFailure) -> None:
    """A page that is missing in a tier is a miss: the policy is about peers."""
    engine = Engine(make_manager(full(page=4), tiers=(Boaster(),)), load_failure=policy)
    engine.add("a", ids(9), max_tokens=3)
    for _ in range(8):
        engine.step()
        for id, loads in engine.scheduler.take_loads():
            for load in loads:
                engine.scheduler.load_failed(id, load)
    assert engine.text["a"] == reference_text(ids(9), 3)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("policy", list(LoadFailure))
def test_a_tier_that_never_answers_costs_its_pages_and_no_request(policy: LoadFailure) -> None:
    engine = Engine(make_manager(full(page=4), tiers=(Boaster(),)), load_failure=policy)
    engine.add("a", ids(9), max_tokens=3)
    pages = [page for _g, numbers in pages_of_tier(engine) for page in numbers]
    engine.scheduler.load_lost("a")
    (given_up,) = engine.scheduler.take_given_up()
    assert [page for _g, numbers in given_up.quarantined for page in numbers] == pages
    engine.run()
    assert engine.text["a"] == reference_text(ids(9), 3)
    engine.kv.restore_quarantined(given_up.quarantined)
    assert_at_rest(engine.kv)


def pages_of_tier(engine: Engine) -> list[tuple[int, list[int]]]:
    loads = loads_of(engine)
    assert all(load.key is not None for load in loads)
    groups = engine.scheduler.requests["a"].kv.groups
    return [(load.group, [groups[load.group].pages[load.interval.start // 4]]) for load in loads]


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


def fetching(engine: Engine) -> None:
    engine.add("a", ids(40), max_tokens=9, k=3, awaits_peer=True)
    engine.step()


def fetched(engine: Engine) -> None:
    """The offer is here, and its first token; no page is."""
    fetching(engine)
    engine.scheduler.fetched("a", offer(40), next_token(list(ids(40))), drafts=2)


def loading(engine: Engine) -> None:
    engine.add("first", ids(20), max_tokens=1)
    engine.run()
    handed_over(engine)
    until(engine, State.LOADING)


def partly_loaded(engine: Engine) -> None:
    handed_over(engine)
    until(engine, State.LOADING)
    ((_id, loads),) = engine.scheduler.take_loads()
    engine.scheduler.load_arrived("a", loads[0])
    engine.scheduler.load_failed("a", loads[1])


def loaded(engine: Engine) -> None:
    """All has arrived, and the request decodes."""
    handed_over(engine, max_tokens=30, drafts=2)
    until(engine, State.LOADING)
    ((_id, loads),) = engine.scheduler.take_loads()
    for load in loads:
        engine.scheduler.load_arrived("a", load)
    until(engine, State.DECODING)
    engine.step()


IN_TRANSFER = (fetching, fetched, loading, partly_loaded, loaded)


@pytest.mark.parametrize("method", ARCHETYPES_WITH_KV)
@pytest.mark.parametrize("step_in_flight", [False, True], ids=["at once", "in flight"])
@pytest.mark.parametrize(
    "reach",
    [waiting, prefilling, decoding, with_a_copy_planned, forked, preempted, *IN_TRANSFER],
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
    pending = engine.scheduler.requests["a"].kv.loads
    pages = pages_of(engine, tuple(load for load, state in pending.items() if state is LoadState.PENDING))
    engine.scheduler.abort("a")
    engine.kv.check_integrity()
    engine.scheduler.abort("a")
    assert "a" not in engine.scheduler.requests
    given_up = engine.scheduler.take_given_up()
    # The transfer driver is told once, with the pages that may still be written to.
    assert given_up == ([("a", pages)] if reach in IN_TRANSFER else [])
    assert bool(pages) == (reach in (loading, partly_loaded))
    assert engine.scheduler.take_given_up() == []
    engine.step()
    engine.drain()
    engine.kv.check_integrity()
    assert available(engine.kv) == [everything(engine.kv)[0] - sum(len(numbers) for _g, numbers in pages)]
    engine.kv.restore_quarantined(pages)
    engine.add("after", ids(40), max_tokens=5, k=3)
    engine.run()
    assert engine.text["after"] == reference_text(ids(40), 5)
    assert_at_rest(engine.kv)


@pytest.mark.parametrize("step_in_flight", [False, True])
def test_an_abort_of_a_held_request_lets_it_go(step_in_flight: bool) -> None:
    engine = make_engine(role=Role.PREFILL, step_in_flight=step_in_flight)
    engine.add("a", ids(40), max_tokens=9, k=2, hand_over=True)
    until(engine, State.HELD)
    engine.scheduler.abort("a")
    # Its lease has to be withdrawn before the next step writes to its pages.
    assert engine.scheduler.take_given_up() == [("a", [])]
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
    scheduler, answers = engine.scheduler, []
    prompts, gone, aside = {}, set(), []

    def advance() -> None:
        """One step, and whatever a transfer driver does around it."""
        for answer in [answer for answer in answers if rng.random() < 0.4]:
            answers.remove(answer)
            answer()
        engine.step()
        for loading_id, loads in scheduler.take_loads():
            for load in loads:
                scheduler.load_arrived(loading_id, load)

    def ask(id: str) -> None:
        prompt = prompts[id]
        token, drafts = (next_token(list(prompt)), rng.randint(0, 2)) if rng.random() < 0.7 else (None, 0)
        engine.add(id, prompt, max_tokens=10, k=2, awaits_peer=True)
        if rng.random() < 0.2:
            answers.append(lambda: scheduler.not_fetched(id))
        else:
            answers.append(lambda: scheduler.fetched(id, offer(len(prompt)), token, drafts=drafts))

    for number in range(40):
        id = f"r{number}"
        prompts[id] = ids(rng.choice((0, 8, 20))) + ids(rng.randint(1, 20), seed=number)
        if rng.random() < 0.3:
            ask(id)
        else:
            engine.add(id, prompts[id], max_tokens=10, k=2)
        for _ in range(rng.randint(0, 3)):
            advance()
        if rng.random() < 0.4 and scheduler.requests:
            victim = rng.choice(sorted(scheduler.requests))
            gone.add(victim)
            scheduler.abort(victim)
            aside += engine.take_quarantined()
            engine.kv.check_integrity()
    for _ in range(300):
        advance()
    engine.run()
    for id in prompts.keys() - gone:
        assert engine.text[id] == reference_text(prompts[id], 10), id
    engine.kv.restore_quarantined(aside)
    assert_at_rest(engine.kv)
