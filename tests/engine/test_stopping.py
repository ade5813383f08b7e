"""Stop strings in a growing text."""

from __future__ import annotations

import pytest

from outrider.engine.stopping import StopStrings


@pytest.mark.parametrize(("strings", "found"), [(("ab", "abc"), "ab"), (("abc", "ab"), "abc"), (("bc", "abc"), "abc")])
def test_the_earliest_match_ends_the_text_and_the_first_named_of_several_there(
    strings: tuple[str, ...], found: str
) -> None:
    assert StopStrings(strings).find("xabc", 0) == (1, found)


def test_a_match_that_was_passed_is_not_found_again() -> None:
    stops = StopStrings(("t", "Z" * 40))
    assert stops.find("a t b", 3) is None
    assert stops.find("a t b" + "Z" * 40, 5) == (5, "Z" * 40)


@pytest.mark.parametrize(("text", "shown"), [("abc", 3), ("abE", 2), ("abEN", 2), ("abENx", 5), ("E", 0), ("", 0)])
def test_what_may_begin_a_stop_string_is_held_back(text: str, shown: int) -> None:
    assert StopStrings(("END",)).safe_length(text) == shown
