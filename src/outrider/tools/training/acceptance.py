"""How many drafts a target would accept, simulated exactly on text that it wrote greedily.

Greedy text does not depend on the drafts, so one pass can draft at every position; the steps that decoding would have
taken follow afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    steps: int
    tokens: int
    """Number of accepted drafts plus one token of the target per step."""
    accepted_at: tuple[int, ...]
    """Number of times that draft 1, 2, … was accepted."""

    @property
    def mean_length(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def plus(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            accepted_at=tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True)),
        )


def nothing(k: int) -> Acceptance:
    return Acceptance(steps=0, tokens=0, accepted_at=(0,) * k)


def answers(roles: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields the range [start, stop) of every answer that the assistant wrote."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], roles.astype(np.int8), [0]])))
    for start, stop in edges.reshape(-1, 2):
        yield int(start), int(stop)


def walk(right: npt.NDArray[np.bool_], start: int, stop: int) -> Acceptance:
    """Simulates decoding of [start, stop); `right[p, j]` says whether draft j + 1 after anchor p is the token there.

    The first token comes from the prefill. Each step drafts after the newest token and takes the drafts that are right
    and one token of the target; drafts past the end count neither as accepted nor as rejected.
    """
    k = right.shape[1]
    steps = tokens = 0
    accepted_at = np.zeros(k, dtype=np.int64)
    anchor = start
    while anchor < stop - 1:
        room = min(k, stop - 1 - anchor)
        hits = right[anchor, :room]
        accepted = int(np.argmin(hits)) if not hits.all() else room
        if accepted == room < k:
            # The text ended inside the block, so the number of accepted drafts is unknown.
            break
        steps += 1
        tokens += accepted + 1
        accepted_at[:accepted] += 1
        anchor += accepted + 1
    return Acceptance(steps=steps, tokens=tokens, accepted_at=tuple(int(count) for count in accepted_at))
