"""Costs of steps: learnt from single steps, carried over to all others by the machine's speed, kept on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.scheduler.pacing.costs import StepCosts, StepShape, StepTimes


def times_of(shape: StepShape, slow: float = 1.0) -> StepTimes:
    target_s = slow * (0.010 + 0.001 * shape.rows)
    draft_s = slow * (0.0001 * shape.fed + sum(0.002 + 0.0001 * rows for rows in shape.passes))
    return StepTimes(target_s, draft_s, target_s + draft_s + slow * 0.001)


SHAPES = [StepShape(n, n * (1 + k), 0, n, (n,) * k) for n in (1, 2, 4, 8) for k in (0, 1, 3)]


def learnt(rounds: int = 60) -> StepCosts:
    costs = StepCosts()
    for _ in range(rounds):
        for shape in SHAPES:
            costs.observe(shape, times_of(shape))
    return costs


def expected_s(costs: StepCosts, shape: StepShape) -> float:
    target_s = costs.target_s(shape.rows, shape.requests, shape.keys)
    host_s = costs.host_s(shape.requests, drafting=shape.rows > shape.requests or bool(shape.passes))
    return target_s + costs.draft_s(shape.fed, shape.passes) + host_s


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_costs_what_it_took(shape: StepShape) -> None:
    assert expected_s(learnt(), shape) == pytest.approx(times_of(shape).total_s, rel=0.05)


def test_the_first_step_sets_the_speed_of_everything() -> None:
    costs = StepCosts()
    shape = StepShape(1, 1, 0, 1, ())
    costs.observe(shape, StepTimes(5.0, 1.0, 6.5))
    assert expected_s(costs, shape) == pytest.approx(6.5)
    assert costs.draft_s(0, (1,)) > 0.1


def test_a_slowdown_is_followed_within_some_thirty_steps_and_for_all_shapes() -> None:
    costs = learnt()
    seen, other = SHAPES[1], SHAPES[-1]
    for _ in range(30):
        costs.observe(seen, times_of(seen, slow=2.0))
    assert expected_s(costs, seen) == pytest.approx(2.0 * times_of(seen).total_s, rel=0.15)
    assert expected_s(costs, other) == pytest.approx(2.0 * times_of(other).total_s, rel=0.25)


def test_one_step_that_was_held_up_changes_little() -> None:
    costs = learnt()
    shape = SHAPES[0]
    before = expected_s(costs, shape)
    costs.observe(shape, times_of(shape, slow=1000.0))
    assert expected_s(costs, shape) < 1.1 * before


def test_what_is_kept_on_disk_says_the_same_when_it_is_read_again() -> None:
    costs = learnt()
    for _ in range(20):
        costs.observe(SHAPES[0], times_of(SHAPES[0], slow=1.5))
    again = StepCosts()
    again.restore(costs.record(), weight=20.0)
    for shape in SHAPES:
        assert expected_s(again, shape) == pytest.approx(expected_s(costs, shape), rel=0.02)
    assert again.speed == 1.0


def test_restored_costs_are_corrected_by_the_steps_that_follow() -> None:
    again = StepCosts()
    again.restore(learnt().record(), weight=20.0)
    for _ in range(60):
        for shape in SHAPES:
            again.observe(shape, times_of(shape, slow=0.5))
    assert expected_s(again, SHAPES[4]) == pytest.approx(0.5 * times_of(SHAPES[4]).total_s, rel=0.05)


def test_restored_costs_are_not_those_of_a_first_step_that_was_held_up() -> None:
    again = StepCosts()
    again.restore(learnt().record(), weight=20.0)
    shape = SHAPES[0]
    before = expected_s(again, shape)
    again.observe(shape, times_of(shape, slow=1000.0))
    assert expected_s(again, shape) < 1.1 * before


def test_what_long_contexts_cost_is_kept_at_the_speed_of_the_machine() -> None:
    costs, again = StepCosts(), StepCosts()
    costs.restore(replace(learnt().record(), per_key_s=1e-5), weight=20.0)
    costs.speed = 3.0
    again.restore(costs.record(), weight=20.0)
    long = StepShape(1, 1, 2000, 1, ())
    assert expected_s(again, long) == pytest.approx(expected_s(costs, long))


def test_a_part_that_takes_no_time_teaches_nothing() -> None:
    costs = learnt()
    before = costs.draft.values.copy(), costs.target.values.copy()
    shape = StepShape(1, 1, 0, 0, ())
    costs.observe(shape, StepTimes(0.0, 0.0, 0.01))
    assert (costs.draft.values, costs.target.values) == before
