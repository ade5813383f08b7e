"""A drafter that notes what it proposed, and hands in something else, so that drafts are accepted in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from outrider.speculative.drafter import Drafter, DraftServices, FeedRow, Proposal, ProposeRow


class Recorded(NamedTuple):
    tokens: list[int]
    """Committed tokens, the last sampled one included."""
    k: int
    drafts: list[int]


class Recorder(Drafter):
    """`hand_in(tokens, drafts)`: the drafts to verify instead."""

    def __init__(self, inner: Drafter, hand_in: Callable[[list[int], list[int]], list[int]] | None = None) -> None:
        self.inner = inner
        self.footprint = inner.footprint
        self.layer_groups = inner.layer_groups
        self.backend = inner.backend
        self.proposals: list[Recorded] = []
        self.batches: list[list[int]] = []
        """The k of each batch's requests."""
        self.fed: list[tuple[str, int, int]] = []
        self._hand_in = hand_in
        self.cut = False
        """Whether the drafter may leave out unlikely drafts."""

    def bind(self, services: DraftServices) -> None:
        self.inner.bind(services)

    def step(self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]) -> list[list[int]]:
        self.fed += [(row.request.id, row.interval.start, row.interval.end) for row in feeds]
        found = self.inner.step(feeds, taps, proposals)
        return self._noted(proposals, [Proposal.of(each).drafts for each in found]) if proposals else []

    def _noted(self, rows: Sequence[ProposeRow], found: list[list[int]]) -> list[list[int]]:
        self.batches.append([row.k for row in rows])
        handed = []
        for row, drafts in zip(rows, found, strict=True):
            tokens = row.request.tokens.tolist()
            assert len(tokens) == row.v + 1
            # Fewer only where unlikely drafts are left out.
            assert len(drafts) == row.k or (self.cut and len(drafts) < row.k)
            self.proposals.append(Recorded(tokens, row.k, drafts))
            handed.append(drafts if self._hand_in is None else self._hand_in(tokens, drafts))
        return handed

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


def mostly_right(texts: Sequence[Sequence[int]]) -> Callable[[list[int], list[int]], list[int]]:
    """Drafts that go on as one of these texts does, wrong from a place on that differs from step to step."""

    def hand_in(tokens: list[int], drafts: list[int]) -> list[int]:
        text = next((t for t in texts if list(t[: len(tokens)]) == tokens), None)
        if text is None:
            return drafts
        right = [*text[len(tokens) : len(tokens) + len(drafts)]]
        right += [0] * (len(drafts) - len(right))
        wrong_from = len(tokens) % (len(drafts) + 1)
        return right[:wrong_from] + drafts[wrong_from:]

    return hand_in
