"""What drafts are worth: a source's own probabilities, corrected by what was accepted."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.pacing.worth import PLACES, Calibration, RequestShifts, Source

DRAFTER = Source.DRAFTER
probabilities = st.floats(0.0, 1.0)


def test_before_anything_was_verified_the_source_is_believed() -> None:
    assert Calibration().conditional(DRAFTER, 0, 0.7) == pytest.approx(0.7)


def test_an_over_confident_source_is_found_out_within_forty_drafts() -> None:
    calibration, random = Calibration(), Random(1)
    for _ in range(40):
        calibration.observe(DRAFTER, 0, 0.97, accepted=random.random() < 0.1)
    assert calibration.conditional(DRAFTER, 0, 0.97) < 0.3
    assert calibration.conditional(Source.OWN_TEXT, 0, 0.97) == pytest.approx(0.97)


def test_a_source_that_becomes_good_is_believed_again() -> None:
    calibration = Calibration()
    for _ in range(400):
        calibration.observe(DRAFTER, 0, 0.9, accepted=False)
    for _ in range(800):
        calibration.observe(DRAFTER, 0, 0.9, accepted=True)
    assert calibration.conditional(DRAFTER, 0, 0.9) > 0.8


def test_a_place_that_is_worse_than_others_is_known_for_itself() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.observe(DRAFTER, 0, 0.75, accepted=True)
        calibration.observe(DRAFTER, 3, 0.75, accepted=False)
    assert calibration.conditional(DRAFTER, 0, 0.75) > 0.9
    assert calibration.conditional(DRAFTER, 3, 0.75) < 0.1
    # Between the two lies a place of which nothing is known.
    assert 0.3 < calibration.conditional(DRAFTER, 1, 0.75) < 0.7


def test_places_past_the_last_one_share_its_correction() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(DRAFTER, PLACES + 5, 0.9, accepted=False)
    assert calibration.conditional(DRAFTER, PLACES - 1, 0.9) == calibration.conditional(DRAFTER, 4 * PLACES, 0.9) < 0.2


@settings(deadline=None)
@given(given_=st.lists(probabilities, min_size=1, max_size=12), shift=st.floats(-4, 4), seed=st.integers(0, 9))
def test_joint_probabilities_never_rise_and_are_products(given_: list[float], shift: float, seed: int) -> None:
    calibration, random = Calibration(), Random(seed)
    for _ in range(100):
        place, probability = random.randrange(9), random.random()
        calibration.observe(DRAFTER, place, probability, accepted=random.random() < probability)
    joint = calibration.joint(DRAFTER, given_, shift)
    assert len(joint) == len(given_)
    assert all(0.0 < after <= before <= 1.0 for before, after in pairwise((1.0, *joint)))
    least = joint[len(joint) // 2]
    cut = calibration.joint(DRAFTER, given_, shift, least=least)
    assert cut == joint[: len(cut)]
    assert all(probability >= least for probability in cut)


def test_a_request_that_is_easier_than_others_gets_a_shift_of_its_own() -> None:
    calibration, easy, hard = Calibration(), RequestShifts(), RequestShifts()
    for _ in range(60):
        for shifts, accepted in ((easy, True), (hard, False)):
            expected = calibration.conditional(DRAFTER, 0, 0.5, shifts.by_source[DRAFTER])
            calibration.observe(DRAFTER, 0, 0.5, accepted=accepted)
            shifts.observe(DRAFTER, expected, accepted=accepted)
    assert calibration.conditional(DRAFTER, 0, 0.5) == pytest.approx(0.5, abs=0.05)
    assert calibration.conditional(DRAFTER, 0, 0.5, easy.by_source[DRAFTER]) > 0.8
    assert calibration.conditional(DRAFTER, 0, 0.5, hard.by_source[DRAFTER]) < 0.2


def test_a_shift_belongs_to_one_source_and_stays_within_bounds() -> None:
    shifts = RequestShifts()
    for _ in range(1000):
        shifts.observe(Source.OWN_TEXT, 0.0, accepted=True)
    assert 0.0 < shifts.by_source[Source.OWN_TEXT] <= 4.0
    assert shifts.by_source[DRAFTER] == 0.0


def test_clearing_forgets_what_was_accepted() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(DRAFTER, 0, 0.9, accepted=False)
    calibration.clear()
    assert calibration.conditional(DRAFTER, 0, 0.9) == pytest.approx(0.9)


def test_what_all_texts_have_in_common_just_now_is_learnt_within_a_few_dozen_drafts() -> None:
    calibration = Calibration()
    for number in range(500):
        calibration.observe(DRAFTER, 0, 0.8, accepted=number % 4 > 0)
    assert calibration.conditional(DRAFTER, 0, 0.8) == pytest.approx(0.75, abs=0.03)
    for _ in range(40):
        calibration.shift(DRAFTER, calibration.conditional(DRAFTER, 0, 0.8), accepted=False)
    assert calibration.conditional(DRAFTER, 0, 0.8) < 0.65
    assert calibration.conditional(Source.OWN_TEXT, 0, 0.8) == pytest.approx(0.8, abs=0.01)
    calibration.clear()
    assert calibration.conditional(DRAFTER, 0, 0.8) == pytest.approx(0.8, abs=0.01)
