"""A request copies from the longest and latest earlier occurrence in its own text, whatever happens to that text."""

from __future__ import annotations

import random
from array import array

import pytest
from tests.speculative.lookup.searched import only, searched_own

from outrider.errors import ConfigError
from outrider.speculative.lookup import Lookup, LookupConfig, Match

EVERY_CANDIDATE = 10_000
"""More candidates than any text here has, so that the search is exhaustive."""


def own_config(rng: random.Random) -> LookupConfig:
    shortest = rng.choice((1, 2, 3))
    return LookupConfig(
        shortest_match=shortest,
        longest_match=shortest + rng.choice((0, 1, 2, 5, 9, 20)),
        most_candidates=EVERY_CANDIDATE,
        most_shared_tokens=0,
    )


@pytest.mark.parametrize("seed", range(60))
def test_drafts_follow_the_longest_and_latest_occurrence(seed: int) -> None:
    rng = random.Random(seed)
    config, alphabet = own_config(rng), rng.choice((1, 2, 3, 8))
    lookup = Lookup(config)
    tokens = array("I", [rng.randrange(alphabet) for _ in range(rng.randrange(1, 400))])
    for _ in range(30):
        k = rng.randrange(1, 7)
        assert lookup.find("a", "", tokens, k) == only(searched_own(tokens, k, config))
        tokens.extend(rng.randrange(alphabet) for _ in range(rng.randrange(5)))


@pytest.mark.parametrize("seed", range(60))
def test_tokens_that_were_taken_back_are_not_copied(seed: int) -> None:
    """What was sampled in a step is taken back before its commit, and something else may follow."""
    rng = random.Random(seed)
    config, alphabet = own_config(rng), rng.choice((2, 3))
    lookup, tokens = Lookup(config), array("I", [rng.randrange(alphabet) for _ in range(rng.randrange(1, 200))])
    for _ in range(30):
        del tokens[max(1, len(tokens) - rng.randrange(12)) :]
        tokens.extend(rng.randrange(alphabet) for _ in range(rng.randrange(12)))
        assert lookup.find("a", "", tokens, 4) == only(searched_own(tokens, 4, config))


def test_a_text_that_is_another_altogether_is_indexed_anew() -> None:
    config = LookupConfig(shortest_match=2, most_shared_tokens=0)
    lookup = Lookup(config)
    lookup.find("a", "", array("I", range(100, 2000)), 4)
    other = array("I", [7, 8, 9, 7, 8])
    assert lookup.find("a", "", other, 2) == [Match([9, 7], 2, False)]


def test_a_text_that_grows_long_is_found_from_its_beginning_to_its_end() -> None:
    """The index makes room several times on the way."""
    rng = random.Random(4)
    text = array("I", [rng.randrange(50_000) for _ in range(3000)])
    lookup, tokens = Lookup(LookupConfig(most_shared_tokens=0)), array("I")
    for start in range(0, 3000, 50):
        tokens.extend(text[start : start + 50])
        lookup.find("a", "", tokens, 4)
    for place in range(32, 2990, 7):
        quoted = text + array("I", [60_000]) + text[place - 5 : place]
        assert lookup.find("a", "", quoted, 3) == [Match(text[place : place + 3].tolist(), 5, False)]


def test_tokens_may_have_32_bits_and_come_in_any_sequence() -> None:
    largest = 2**32 - 1
    tokens = [largest, 2**31, 5, largest, 2**31]
    lookup = Lookup(LookupConfig(shortest_match=2, most_shared_tokens=0))
    assert lookup.find("a", "", tokens, 1) == [Match([5], 2, False)]
    assert lookup.find("b", "", tuple(tokens), 1) == [Match([5], 2, False)]


def test_nothing_is_found_in_texts_that_are_too_short() -> None:
    lookup = Lookup(LookupConfig(shortest_match=1))
    assert lookup.find("a", "", array("I"), 4) == []
    assert lookup.find("a", "", array("I", [5]), 4) == []
    assert lookup.find("a", "", array("I", [5, 5]), 4) == [Match([5, 5, 5, 5], 1, False)]


def test_with_no_drafts_wanted_the_text_is_indexed_all_the_same() -> None:
    lookup, tokens = Lookup(LookupConfig(shortest_match=2)), array("I", [1, 2, 3, 1, 2])
    assert lookup.find("a", "", tokens, 0) == []
    assert (lookup.indexed_tokens, lookup.lookups) == (5, 0)
    assert lookup.find("a", "", tokens, 1) == [Match([3], 2, False)]
    assert (lookup.indexed_tokens, lookup.lookups) == (5, 1)


def test_a_call_compares_a_bounded_number_of_occurrences_for_each_length_of_key() -> None:
    """However often the last token of a text occurs, a call costs the same; long matches are found all the same."""
    often = [9, 3] * 10
    brief = [1, 2, 3, 7, *often, 1, 2, 3]
    long = [*range(11, 21), 3, 7, *often, *range(11, 21), 3]

    def found(tokens: list[int], most_candidates: int) -> list[Match]:
        config = LookupConfig(shortest_match=1, most_candidates=most_candidates, most_shared_tokens=0)
        return Lookup(config).find("a", "", tokens, 1)

    assert found(brief, 64) == [Match([7], 3, False)]
    assert found(brief, 4) == [Match([1], 1, False)]
    assert found(long, 4) == [Match([7], 11, False)]


@pytest.mark.parametrize("period", [1, 2, 7])
def test_long_repeats_cost_as_much_as_any_other_text(period: int) -> None:
    """Each call compares one occurrence only: the latest one agrees as far as a match may."""
    lookup = Lookup(LookupConfig())
    tokens = array("I", [place % period for place in range(20_000)])
    found = lookup.find("a", "", tokens, 5)
    assert found == [Match([(20_000 + place) % period for place in range(5)], 32, False)]
    assert lookup.indexed_tokens == 20_000
    assert lookup.memory_bytes < 64 * 20_000


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="shortest_match"):
        LookupConfig(shortest_match=33)
    with pytest.raises(ConfigError, match="shortest_shared_match"):
        LookupConfig(shortest_match=2, longest_match=4)
    with pytest.raises(ConfigError, match="most_candidates"):
        LookupConfig(most_candidates=0)
    with pytest.raises(ConfigError, match="most_shared_tokens"):
        LookupConfig(most_shared_tokens=-1)
    assert LookupConfig(shortest_match=2, longest_match=4, most_shared_tokens=0).own_keys == (4, 3, 2)
