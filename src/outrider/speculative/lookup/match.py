"""What the look-up finds, and how likely it is to be right before anything is known about a request."""

from __future__ import annotations

from typing import NamedTuple

EVEN_LENGTH = 3.0
"""Length of a match after which a copied token is as likely right as wrong."""
SHARED_DISCOUNT = 0.9
"""What is left of a probability if the match is in another text: a text repeats itself more than it repeats others."""


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a text, and what followed it.

    earlier text   … [ length tokens ) [ drafts )
    this text      … [ length tokens ) end
    """

    drafts: list[int]
    """At least one token, at most k."""
    length: int
    """Number of last tokens that agree, up to `LookupConfig.longest_match`."""
    shared: bool
    """Whether the occurrence is in a finished text rather than in the request's own."""

    def probabilities(self) -> list[float]:
        """For each draft, the probability that it is accepted if all drafts before it are."""
        return [draft_probability(self.length, place, self.shared) for place in range(len(self.drafts))]


def draft_probability(length: int, place: int, shared: bool) -> float:
    """Returns the probability that the draft at `place` is accepted if all drafts before it are.

    Once the drafts before it are accepted, `length + place` tokens agree with the occurrence that is copied, so the
    draft is as good as the first one of a match of that length. With a match of n tokens it is n / (n + 3): 0.5 for
    3 tokens, 0.73 for 8, 0.91 for 32; and nine tenths of that if the occurrence is in another text.
    """
    agreeing = length + place
    probability = agreeing / (agreeing + EVEN_LENGTH)
    return SHARED_DISCOUNT * probability if shared else probability
