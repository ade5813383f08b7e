"""The accept rule: which tokens a step commits, given its drafts and the tokens that the target sampled."""

from __future__ import annotations

from collections.abc import Sequence


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that one request gains. `sampled` holds the target's choice at each draft and after the last.

    A row that could not be sampled holds a number that is no token id. It equals no draft, so it can only be
    the last token returned, and only if all drafts before it were accepted.
    """
    assert len(sampled) == len(drafts) + 1
    # Drafts are accepted while they equal what the target sampled at their position;
    # the first sample that differs, or the one after the last draft, is kept as well.
    # So k drafts yield between 1 and k + 1 tokens, all of them the target's own.
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return tuple(sampled[: accepted + 1])
