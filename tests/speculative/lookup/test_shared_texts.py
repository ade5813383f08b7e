"""Requests copy from finished texts of their own tenant, as long as these are kept, and from no others."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.speculative.lookup.searched import searched

from outrider.speculative.lookup import Lookup, LookupConfig, Match


def random_text(rng: random.Random, alphabet: int, most: int) -> array[int]:
    return array("I", [rng.randrange(alphabet) for _ in range(rng.randrange(1, most))])


@pytest.mark.parametrize("seed", range(60))
def test_drafts_follow_the_longest_and_latest_occurrence_of_the_tenant(seed: int) -> None:
    rng = random.Random(seed)
    shortest = rng.choice((1, 2, 3))
    config = LookupConfig(
        shortest_match=shortest,
        longest_match=shortest + rng.choice((2, 9, 20)),
        shortest_shared_match=shortest + rng.randrange(3),
        most_shared_tokens=20_000,
        most_candidates=100_000,
    )
    lookup, alphabet = Lookup(config), rng.choice((2, 3, 8))
    finished: dict[str, list[array[int]]] = {"": [], "a": [], "b": []}
    for number in range(12):
        salt, name = rng.choice(list(finished)), str(number)
        tokens = random_text(rng, alphabet, 60)
        for _ in range(8):
            k = rng.randrange(1, 7)
            assert lookup.find(name, salt, tokens, k) == searched(finished[salt], tokens, k, config)
            tokens.extend(random_text(rng, alphabet, 5))
        lookup.finish(name, salt, tokens)
        finished[salt].append(tokens)


def test_texts_that_begin_alike_are_stored_once_and_searched_whole() -> None:
    """A conversation's next turn begins with all that was said before."""
    rng = random.Random(1)
    lookup = Lookup(LookupConfig(most_shared_tokens=100_000))
    turn = array("I", [rng.randrange(50_000) for _ in range(1000)])
    lookup.finish("first", "", turn)
    for number in range(10):
        turn = turn + array("I", [rng.randrange(50_000) for _ in range(100)])
        lookup.finish(f"turn {number}", "", turn)
    assert lookup.shared_tokens < 2000 + 10 * (64 + 64 + 32)
    for place in range(40, len(turn) - 4):
        tokens = array("I", [1, 2]) + turn[place - 36 : place]
        found = lookup.find("next", "", tokens, 4)
        assert found == [Match(turn[place : place + 4].tolist(), 32, True)], place


def test_the_oldest_texts_go_first_and_memory_stays_bounded() -> None:
    config = LookupConfig(most_shared_tokens=1000)
    lookup, rng = Lookup(config), random.Random(2)
    texts = [array("I", [rng.randrange(1 << 32) for _ in range(90)]) for _ in range(100)]
    sizes = set()
    for number, text in enumerate(texts):
        lookup.finish(str(number), f"tenant {number % 3}", text)
        lookup.forget("probe")
        assert lookup.shared_tokens <= 1000
        sizes.add(lookup.memory_bytes)
        kept = [
            each
            for each, earlier in enumerate(texts[: number + 1])
            if lookup.find("probe", f"tenant {each % 3}", earlier[:40], 4)
        ]
        assert kept == list(range(max(0, number - 10), number + 1))
    assert len(sizes) == 1
    assert lookup.evicted_texts == 89


def test_a_text_that_does_not_fit_is_kept_at_its_end() -> None:
    lookup = Lookup(LookupConfig(most_shared_tokens=100))
    long = array("I", range(1000))
    for _ in range(2):
        lookup.finish("a", "", long)
        assert lookup.shared_tokens == 100
        assert lookup.find("b", "", long[:940], 4) == [Match([940, 941, 942, 943], 32, True)]
        assert lookup.find("c", "", long[:800], 4) == []


def test_what_a_long_text_was_cut_by_may_enter_with_a_later_one() -> None:
    lookup = Lookup(LookupConfig(most_shared_tokens=200))
    long = array("I", range(1000))
    lookup.finish("a", "", long)
    lookup.finish("b", "", long[:150])
    assert lookup.find("c", "", long[:50], 4) == [Match([50, 51, 52, 53], 32, True)]


def test_an_evicted_beginning_is_stored_again() -> None:
    """The first blocks of a text are left out only while a text that begins with them is kept."""
    lookup = Lookup(LookupConfig(most_shared_tokens=1000))
    first = array("I", range(400))
    lookup.finish("a", "", first)
    lookup.finish("b", "", array("I", range(1000, 1800)))
    assert lookup.find("probe", "", first[:50], 2) == []
    lookup.finish("c", "", first)
    assert lookup.find("probe", "", first[:50], 2) == [Match([50, 51], 32, True)]


def test_a_beginning_that_was_evicted_before_what_follows_it_is_stored_again() -> None:
    """Of the second text, only what the first one does not have was stored."""
    lookup, text = Lookup(LookupConfig(most_shared_tokens=2000)), array("I", range(1280))
    lookup.finish("a", "", text[:640])
    lookup.finish("b", "", text)
    lookup.finish("c", "", array("I", range(5000, 5700)))
    assert lookup.evicted_texts == 1
    assert lookup.find("probe", "", text[:50], 2) == []
    lookup.finish("d", "", text)
    assert lookup.find("probe", "", text[:50], 2) == [Match([50, 51], 32, True)]


def test_no_more_tokens_are_kept_than_there_is_room_for() -> None:
    lookup = Lookup(LookupConfig(shortest_shared_match=3, most_shared_tokens=20))
    for number in range(9):
        lookup.finish("a", "", array("I", range(10 * number, 10 * number + 7)))
        assert lookup.shared_tokens == min(14, 7 * (number + 1))


def test_drafts_end_where_the_text_ended() -> None:
    lookup = Lookup(LookupConfig(shortest_shared_match=2))
    lookup.finish("a", "", array("I", [1, 2, 3, 4]))
    lookup.finish("b", "", array("I", [9, 9, 8, 8, 7, 7]))
    assert lookup.find("c", "", array("I", [2, 3]), 8) == [Match([4], 2, True)]
    assert lookup.find("d", "", array("I", [3, 4]), 8) == []


def test_finished_texts_are_searched_for_longer_matches_than_the_own_text_has() -> None:
    lookup = Lookup(LookupConfig(shortest_match=2, shortest_shared_match=2))
    lookup.finish("a", "", array("I", [6, 1, 2, 5]))
    assert lookup.find("b", "", array("I", [1, 2, 3, 1, 2]), 1) == [Match([3], 2, False)]
    assert lookup.find("c", "", array("I", [1, 2, 3, 6, 1, 2]), 1) == [Match([3], 2, False), Match([5], 3, True)]
    assert (lookup.lookups, lookup.own_hits, lookup.shared_hits) == (2, 2, 1)


def forget(lookup: Lookup, text: array[int]) -> None:
    lookup.find("a", "", text, 1)
    lookup.forget("a")


def finish_and_reset(lookup: Lookup, text: array[int]) -> None:
    lookup.finish("a", "", text)
    lookup.reset()


@pytest.mark.parametrize("end", [forget, finish_and_reset])
def test_texts_that_were_dropped_are_not_copied(end: Callable[[Lookup, array[int]], None]) -> None:
    lookup, text = Lookup(LookupConfig()), array("I", range(100))
    end(lookup, text)
    assert lookup.find("b", "", text[:50], 4) == []
    assert lookup.shared_tokens == 0
    lookup.finish("c", "", text)
    assert lookup.find("b", "", text[:50], 4) == [Match([50, 51, 52, 53], 32, True)]


def test_a_request_that_ended_begins_anew_under_its_key() -> None:
    lookup = Lookup(LookupConfig(shortest_match=1, most_shared_tokens=0))
    lookup.find("a", "", array("I", [1, 2, 3, 1]), 1)
    lookup.finish("a", "", array("I", [1, 2, 3, 1]))
    assert lookup.memory_bytes == 0
    assert lookup.find("a", "", array("I", [5, 1]), 1) == []


def test_a_reset_leaves_requests_their_own_texts_and_the_counters() -> None:
    lookup = Lookup(LookupConfig(shortest_match=2))
    tokens = array("I", [1, 2, 3, 1, 2])
    lookup.find("a", "", tokens, 1)
    lookup.finish("b", "", array("I", range(50)))
    indexed = lookup.indexed_tokens
    lookup.reset()
    assert lookup.indexed_tokens == indexed
    assert lookup.find("a", "", tokens, 1) == [Match([3], 2, False)]


def test_tenants_whose_runs_lie_in_one_chain_are_kept_apart() -> None:
    """The index is shared, and so small here that the runs of different tenants must meet in it."""
    config = LookupConfig(shortest_match=3, shortest_shared_match=3, most_shared_tokens=16)
    lookup = Lookup(config)
    for number in range(200):
        lookup.finish("a", f"tenant {number}", array("I", [1, 2, 3, 100 + number]))
        for tenant in range(max(0, number - 3), number + 1):
            found = lookup.find("probe", f"tenant {tenant}", array("I", [1, 2, 3]), 1)
            assert found == [Match([100 + tenant], 3, True)]


def test_a_text_that_two_tenants_wrote_is_kept_for_both() -> None:
    lookup, text = Lookup(LookupConfig(most_shared_tokens=2000)), array("I", range(500))
    for salt in ("a", "b"):
        lookup.finish("finished", salt, text)
        for place in (50, 300, 450):
            found = lookup.find(f"{salt} {place}", salt, text[:place], 2)
            assert found == [Match([place, place + 1], 32, True)]
    assert lookup.shared_tokens == 1000


SALTS = ("", "a", "b", "a\0b")
calls = st.lists(
    st.tuples(
        st.sampled_from(["find", "finish", "forget", "reset"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 2), max_size=40),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(calls=calls, most_shared_tokens=st.integers(1, 120), most_candidates=st.integers(1, 8))
def test_tenants_never_see_the_tokens_of_others(
    calls: list[tuple[str, int, list[int]]], most_shared_tokens: int, most_candidates: int
) -> None:
    """All tenants write texts of the same shape, each in tokens of its own: the runs that precede a draft are common to
    all, the draft tells whose text it is from."""
    config = LookupConfig(
        shortest_match=1,
        longest_match=4,
        shortest_shared_match=1,
        most_shared_tokens=most_shared_tokens,
        most_candidates=most_candidates,
    )
    lookup = Lookup(config)
    for number, (call, tenant, written) in enumerate(calls):
        # Two tokens that all tenants use, then one that only this one does.
        text = array("I", [0, 1])
        for token in written:
            text.extend((token, 10 * (tenant + 1) + token))
        key, salt = f"{tenant}-{number % 3}", SALTS[tenant]
        if call == "find":
            found = lookup.find(key, salt, text, 4)
            for match in found:
                assert all(token < 3 or token // 10 == tenant + 1 for token in match.drafts)
                assert 1 <= len(match.drafts) <= 4
        elif call == "finish":
            lookup.finish(key, salt, text)
            assert lookup.shared_tokens <= most_shared_tokens
        elif call == "forget":
            lookup.forget(key)
        else:
            lookup.reset()


def test_what_is_found_depends_on_the_calls_only() -> None:
    def found() -> list[list[Match]]:
        rng, lookup, results = random.Random(3), Lookup(LookupConfig(most_shared_tokens=500, most_candidates=2)), []
        for number in range(60):
            salt, tokens = rng.choice("ab"), random_text(rng, 3, 80)
            results.append(lookup.find(str(number), salt, tokens, 4))
            lookup.finish(str(number), salt, tokens)
        return results

    first = found()
    assert any(match.shared for matches in first for match in matches)
    assert found() == first
