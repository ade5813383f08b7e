"""What a drafter must fit: the target, the operations, the pages, the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.layers.ops import Ops
from outrider.models.load import LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrafterSettings:
    target: LoadedModel
    ops: Ops
    page_tokens: int
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    as_stored: bool = False
    """Matrices that a file stores in fewer bits than `dtype` stay so."""
    progress: Callable[[str, int, int], None] | None = None
    taps: tuple[int, ...] | None = None
    """Target layers to read in place of those that the checkpoint names; for finding out which are right."""

    def fingerprint(self, weights: str) -> str:
        """Of a drafter with these weights: what it keeps also depends on where it reads."""
        return weights if self.taps is None else f"{weights}/taps {','.join(map(str, self.taps))}"
