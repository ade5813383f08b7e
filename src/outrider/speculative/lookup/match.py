"""What the look-up finds, and how likely it is to be right before anything is known about a request."""

from __future__ import annotations

from typing import NamedTuple

OWN_EVEN_LENGTH = 2.0
"""Length of a match in the request's own text after which a copied token is as likely right as wrong. Measured on
answers that copy from their prompts."""
SHARED_EVEN_LENGTH = 9.0
"""Length of a match in another text after which that is so. Measured between requests that have little in common."""


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
    draft is as good as the first one of a match of that length. After n tokens that agree it is n / (n + 2) in the
    request's own text (0.6 for 3 tokens, 0.8 for 8, 0.94 for 32), and n / (n + 9) in another one (0.25, 0.47, 0.78).
    """
    agreeing = length + place
    return agreeing / (agreeing + (SHARED_EVEN_LENGTH if shared else OWN_EVEN_LENGTH))
