"""A drafter's own, smaller vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftVocabulary:
    size: int
    """Tokens of the target."""
    target_ids: Tensor | None = None
    """int64 [draft tokens]: what the target calls each of them; None where the two vocabularies are one."""

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; tokens that cannot be drafted get none."""
        if self.target_ids is None:
            return logits
        spread = logits.new_full((logits.shape[0], self.size), float("-inf"))
        spread[:, self.target_ids] = logits
        return spread
