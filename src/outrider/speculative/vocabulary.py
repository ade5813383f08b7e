"""The tokens that a drafter can propose: all of the target's, or a reduced vocabulary of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftVocabulary:
    size: int
    """Number of tokens of the target."""
    target_ids: Tensor | None = None
    """int64 [draft tokens]: the target's id of each draft token; None if both use the same ids."""

    _listed: list[int] | None = field(default=None, init=False, repr=False)
    """`target_ids` as a list: for the few tokens of a step, tensor operations take longer than the look-up."""

    def ids(self, places: Sequence[int]) -> list[int]:
        """The target's ids of the tokens at these places of the drafter's vocabulary."""
        if self.target_ids is None:
            return list(places)
        if self._listed is None:
            object.__setattr__(self, "_listed", self.target_ids.tolist())
        assert self._listed is not None
        return [self._listed[place] for place in places]

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; tokens that cannot be drafted get minus infinity."""
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
