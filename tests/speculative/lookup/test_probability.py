"""The prior probability of a draft grows with what agrees before it, and is smaller in texts of others."""

from __future__ import annotations

import pytest

from outrider.speculative.lookup import Match, draft_probability


@pytest.mark.parametrize("shared", [False, True])
def test_longer_agreement_is_better(shared: bool) -> None:
    for length in range(1, 33):
        for place in range(16):
            here = draft_probability(length, place, shared)
            assert 0 < here < 1
            assert here < draft_probability(length + 1, place, shared)
            # The drafts before it agree, too, once they are accepted.
            assert draft_probability(length, place + 1, shared) == draft_probability(length + 1, place, shared)
            assert draft_probability(length, place, True) < draft_probability(length, place, False)


def test_a_match_gives_one_probability_for_each_draft() -> None:
    match = Match([5, 6, 7], 9, True)
    assert match.probabilities() == [draft_probability(9 + place, 0, True) for place in range(3)]
    assert Match([5], 3, False).probabilities() == [0.6]
