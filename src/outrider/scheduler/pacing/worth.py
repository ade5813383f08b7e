"""What a draft is worth: the drafter's own probabilities, corrected by what was accepted.

A drafter's probability says that the draft is accepted if all drafts before it are. It is corrected in three steps: by
probability for each source of drafts, by place among the drafts, and by shifts of the log-odds, one for all requests,
which follows a change of the texts within a few steps, and one for each request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from math import exp
from typing import NamedTuple

BIN_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PLACES = 8
"""Places with a correction of their own; the last one stands for all after it."""
OWN_WEIGHT = 5.0
"""Number of observations that the drafter's own probability counts for."""
POOLED_WEIGHT = 8.0
"""Number of observations that the correction over all places counts for at each place."""
DECAY = 1.0 - 1.0 / 400.0
"""What an observation still counts for after the next one of its kind."""
SHARED_SHIFT_RATE, SHARED_SHIFT_DECAY = 0.03, 0.995
SHIFT_RATE = 0.15
SHIFT_DECAY = 0.982
LARGEST_SHIFT = 4.0
LEAST, MOST = 0.001, 0.999


class Source(IntEnum):
    """Where drafts come from."""

    DRAFTER = 0
    OWN_TEXT = 1
    """Looked up in the request's own text."""
    SHARED_TEXT = 2
    """Looked up in the finished texts of its tenant."""
    GRAMMAR = 3
    """Dictated by the request's grammar."""


class Proposed(NamedTuple):
    """Drafts that wait for verification, with how likely each is to be accepted."""

    source: Source
    probabilities: tuple[float, ...]
    """For each draft, the probability by its source that it is accepted if all before it are."""
    joint: tuple[float, ...]
    """For each draft, the corrected probability that it and all before it are accepted. Never rises."""


class Calibration:
    """Corrections that all requests share."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets what was accepted."""
        bins = len(BIN_EDGES) + 1
        self._accepted = [[[0.0] * bins for _ in range(PLACES + 1)] for _ in Source]
        """By source, place and bin; the last place stands for all of them."""
        self._drafts = [[[0.0] * bins for _ in range(PLACES + 1)] for _ in Source]
        self._shifts = [0.0] * len(Source)
        """By source: the shift of the log-odds for all requests."""

    def conditional(self, source: Source, place: int, probability: float, shift: float = 0.0) -> float:
        """The corrected probability that a draft is accepted if all before it are."""
        number = bisect_right(BIN_EDGES, probability)
        accepted, drafts = self._accepted[source], self._drafts[source]
        pooled = (accepted[PLACES][number] + OWN_WEIGHT * probability) / (drafts[PLACES][number] + OWN_WEIGHT)
        row = place if place < PLACES else PLACES - 1
        found = (accepted[row][number] + POOLED_WEIGHT * pooled) / (drafts[row][number] + POOLED_WEIGHT)
        found = LEAST if found < LEAST else MOST if found > MOST else found
        shift += self._shifts[source]
        if shift:
            odds = found / (1.0 - found) * exp(shift)
            found = odds / (1.0 + odds)
        return found

    def joint(
        self, source: Source, probabilities: Sequence[float], shift: float = 0.0, *, least: float = 0.0
    ) -> tuple[float, ...]:
        """The corrected probabilities that each draft and all before it are accepted, as long as they are at least
        `least`."""
        product, found = 1.0, []
        for place, probability in enumerate(probabilities):
            product *= self.conditional(source, place, probability, shift)
            if product < least:
                break
            found.append(product)
        return tuple(found)

    def observe(self, source: Source, place: int, probability: float, *, accepted: bool) -> None:
        """Learns from a draft that was verified after all drafts before it had been accepted."""
        number = bisect_right(BIN_EDGES, probability)
        for row in (min(place, PLACES - 1), PLACES):
            self._accepted[source][row][number] = self._accepted[source][row][number] * DECAY + accepted
            self._drafts[source][row][number] = self._drafts[source][row][number] * DECAY + 1.0

    def shift(self, source: Source, expected: float, *, accepted: bool) -> None:
        """Learns how the texts of just now differ from those before. `expected`: the probability with all shifts."""
        shift = self._shifts[source] * SHARED_SHIFT_DECAY + SHARED_SHIFT_RATE * (accepted - expected)
        self._shifts[source] = min(LARGEST_SHIFT, max(-LARGEST_SHIFT, shift))


class RequestShifts:
    """How much easier or harder than others a request is to draft for: a shift of the log-odds for each source."""

    __slots__ = ("by_source",)

    def __init__(self) -> None:
        self.by_source = [0.0] * len(Source)

    def observe(self, source: Source, expected: float, *, accepted: bool) -> None:
        """`expected`: the probability of acceptance with the shift that held before."""
        shift = self.by_source[source] * SHIFT_DECAY + SHIFT_RATE * (accepted - expected)
        self.by_source[source] = min(LARGEST_SHIFT, max(-LARGEST_SHIFT, shift))
