"""Curves: exact at observed counts, sensible between and beyond them, and able to forget."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.pacing.curves import KNOTS, Curve


def flat() -> Curve:
    return Curve([1.0] * len(KNOTS))


def teach(curve: Curve, count: int, seconds: float, times: int, *, first_step: int = 0) -> None:
    for step in range(first_step, first_step + times):
        curve.learn(count, log(seconds / curve.at(count)), step)


def test_nothing_costs_nothing() -> None:
    assert flat().at(0) == 0.0
    assert flat().at(-1) == 0.0


@settings(deadline=None)
@given(low=st.integers(0, len(KNOTS) - 2), fraction=st.floats(0, 1))
def test_between_two_knots_a_curve_is_a_straight_line(low: int, fraction: float) -> None:
    curve = Curve([float(knot) ** 1.5 for knot in KNOTS])
    first, last = KNOTS[low], KNOTS[low + 1]
    count = first + round(fraction * (last - first))
    expected = first**1.5 + (last**1.5 - first**1.5) * (count - first) / (last - first)
    assert curve.at(count) == pytest.approx(expected)


def test_a_count_beyond_the_last_knot_goes_on_as_a_straight_line() -> None:
    curve = Curve([float(knot) for knot in KNOTS])
    assert curve.at(3 * KNOTS[-1]) == pytest.approx(3.0 * KNOTS[-1])


def test_knots_without_observations_are_scaled_like_their_neighbours() -> None:
    curve = Curve([float(knot) for knot in KNOTS])
    curve.put(4, 40.0, 10.0)
    curve.put(16, 160.0, 10.0)
    # Ten times the shape wherever it was seen, and so in between and below.
    assert curve.at(8) == pytest.approx(80.0)
    assert curve.at(1) == pytest.approx(10.0)
    assert [knot for knot, _value in curve.observed] == [4, 16]


def test_between_knots_of_different_scale_the_scale_changes_gradually() -> None:
    curve = flat()
    curve.put(4, 2.0, 10.0)
    curve.put(16, 8.0, 10.0)
    values = [curve.at(count) for count in range(4, 17)]
    assert all(before < after for before, after in pairwise(values))


def test_beyond_the_largest_observed_count_a_curve_rises_as_before_but_never_faster_than_in_proportion() -> None:
    curve = flat()
    curve.put(8, 10.0, 10.0)
    curve.put(16, 12.0, 10.0)
    assert curve.at(32) == pytest.approx(12.0 + 16 * 2.0 / 8)
    steep = flat()
    steep.put(8, 1.0, 10.0)
    steep.put(16, 100.0, 10.0)
    assert steep.at(32) <= 200.0 + 1e-9


def test_a_curve_that_fell_is_expected_to_stay_flat() -> None:
    curve = flat()
    curve.put(8, 10.0, 10.0)
    curve.put(16, 9.0, 10.0)
    assert curve.at(64) == pytest.approx(9.0)


@settings(deadline=None)
@given(count=st.integers(1, 2000), seconds=st.floats(1e-5, 10.0))
def test_a_count_that_is_observed_again_and_again_gets_its_value(count: int, seconds: float) -> None:
    curve = flat()
    teach(curve, count, seconds, 400)
    assert curve.at(count) == pytest.approx(seconds, rel=0.05)


def test_what_is_older_than_some_hundred_observations_is_forgotten() -> None:
    curve = flat()
    teach(curve, 4, 1.0, 500)
    teach(curve, 4, 3.0, 250, first_step=500)
    assert curve.at(4) == pytest.approx(3.0, rel=0.05)


def test_first_observations_of_a_knot_leave_those_of_its_neighbours() -> None:
    """Knots are measured one after the other: each corrects the guess for itself only."""
    curve = Curve([1.0 + 0.5 * knot for knot in KNOTS])
    for count in (1, 2, 3, 4, 6, 8, 12, 16):
        teach(curve, count, 1.0, 4)
    assert [curve.at(count) for count in (1, 2, 3, 4)] == pytest.approx([1.0] * 4, rel=0.05)


def test_a_knot_that_is_observed_for_long_takes_its_neighbours_along() -> None:
    """Otherwise the next row would seem to cost, or to save, what only the machine's mood changed."""
    curve = flat()
    for count in (3, 4, 5):
        curve.put(count, 1.0, 50.0)
    for _ in range(20):
        curve.learn(4, 0.1, 0)
    moved = exp(0.02 * 0.1 * 20)
    assert curve.at(4) == pytest.approx(moved, rel=1e-3)
    assert 1.0 < curve.at(5) < moved


def test_a_knot_that_was_not_observed_for_long_is_soon_learnt_anew() -> None:
    curve, steady = flat(), flat()
    for each, first_step in ((curve, 2000), (steady, 500)):
        teach(each, 4, 1.0, 500)
        teach(each, 4, 3.0, 5, first_step=first_step)
    assert curve.at(4) == pytest.approx(3.0, rel=0.05)
    assert steady.at(4) < 1.5


def test_what_was_just_observed_is_not_corrected_by_what_was_only_interpolated() -> None:
    """Rows cost time in tiles: the first row of a tile costs as much as its last."""
    curve = Curve([1.0 + 0.05 * knot for knot in KNOTS])
    for step in range(200):
        for count, seconds in ((8, 1.0), (9, 2.0)):
            curve.learn(count, log(seconds / curve.at(count)), step)
    assert curve.at(8) == pytest.approx(1.0, rel=0.02)
    assert curve.at(9) == pytest.approx(2.0, rel=0.02)
    assert all(curve.at(low) <= curve.at(high) for low, high in pairwise(range(1, 17)))


def test_what_a_further_row_costs_stays_while_only_one_number_of_rows_is_run() -> None:
    curve = flat()
    for count in (1, 2, 4, 8):
        curve.put(count, 1.0 + 0.1 * count, 10.0)
    further_s = curve.at(8) - curve.at(4)
    teach(curve, 4, 2.0, 500, first_step=2000)
    assert curve.at(4) == pytest.approx(2.0, rel=0.05)
    assert curve.at(8) - curve.at(4) == pytest.approx(further_s, rel=0.2)
