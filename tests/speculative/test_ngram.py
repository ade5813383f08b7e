"""Look-up proposes what followed the longest and latest occurrence of the text's last tokens, however it is asked."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.speculative.drafter import ProposeRow
from outrider.speculative.drafters.ngram import NgramDrafter


def searched(tokens: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The same, by a search of the whole text. A copy that reaches the end of the text goes on in what it copied."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for place in range(count):
                    text.append(text[end + place])
                return text[len(tokens) :]
    return []


def drafts(drafter: NgramDrafter, name: str, tokens: list[int], count: int) -> list[int]:
    request: Any = SimpleNamespace(id=name, tokens=array("I", tokens))
    (found,) = drafter.propose([ProposeRow(request, len(tokens) - 1, count)])
    return found


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_those_of_a_search(seed: int) -> None:
    rng = random.Random(seed)
    shortest = rng.choice((1, 1, 2))
    longest = shortest + rng.randrange(3)
    drafter, tokens = (
        NgramDrafter(shortest=shortest, longest=longest),
        [rng.randrange(3) for _ in range(rng.randrange(1, 6))],
    )
    for _ in range(20):
        count = rng.randrange(1, 7)
        assert drafts(drafter, "a", tokens, count) == searched(tokens, count, shortest, longest)
        # Texts grow by one token or by several; a step may also ask again without any.
        tokens += [rng.randrange(3) for _ in range(rng.randrange(4))]


def test_requests_have_texts_of_their_own_and_are_forgotten() -> None:
    drafter = NgramDrafter(shortest=1, longest=2)
    assert drafts(drafter, "a", [1, 2, 3, 1], 2) == [2, 3]
    assert drafts(drafter, "b", [1, 7, 8, 1], 2) == [7, 8]
    drafter.forget("a")
    drafter.forget("never seen")
    assert drafts(drafter, "a", [9, 1, 4, 1], 2) == [4, 1]
