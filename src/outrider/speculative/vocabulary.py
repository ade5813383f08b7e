"""A drafter's own, smaller vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftVocabulary:
    size: int
    """Tokens of the target."""
    target_ids: Tensor | None = None
    """int64 [draft tokens]: what the target calls each of them; None where the two vocabularies are one."""

    _listed: list[int] | None = field(default=None, init=False, repr=False)
    """The same, for the few of a step: going through tensors takes longer than the look-up."""

    def ids(self, places: Sequence[int]) -> list[int]:
        """What the target calls the tokens at these places of the drafter's vocabulary."""
        if self.target_ids is None:
            return list(places)
        if self._listed is None:
            object.__setattr__(self, "_listed", self.target_ids.tolist())
        assert self._listed is not None
        return [self._listed[place] for place in places]

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; tokens that cannot be drafted get none."""
        if self.target_ids is None:
            if logits.shape[1] == self.size:
                return logits
            # Checkpoints pad their vocabularies differently; the shared tokens come first.
            padded = logits.new_full((logits.shape[0], self.size), float("-inf"))
            width = min(self.size, logits.shape[1])
            padded[:, :width] = logits[:, :width]
            return padded
        spread = logits.new_full((logits.shape[0], self.size), float("-inf"))
        spread[:, self.target_ids] = logits
        return spread
