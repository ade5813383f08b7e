"""What a drafter must fit: the target, the operations, the pages, the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.layers.ops import Ops
from outrider.models.load import LoadedModel
from outrider.models.packing import Packer
from outrider.models.parameters import Matrix


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
    packed: bool = False
    """Matrices of 16 bits are kept in 8: half the memory to read, at the price of a draft now and then."""
    draft_vocab_size: int | None = None
    """Draft only so many of the most frequent tokens; 0: all; None: what pays here."""
    most_drafts: int | None = None
    """No request will ever want more; None: as many as the drafter is made for."""
    progress: Callable[[str, int, int], None] | None = None
    taps: tuple[int, ...] | None = None
    """Target layers to read in place of those that the checkpoint names; for finding out which are right."""

    def fingerprint(self, weights: str) -> str:
        """Of a drafter with these weights: what it keeps also depends on where it reads."""
        taps = "" if self.taps is None else f"/taps {','.join(map(str, self.taps))}"
        return f"{weights}{taps}{'/8 bits' if self.packed else ''}"

    def packer(self) -> Callable[[Matrix], Matrix]:
        """What a drafter does with each of its matrices."""
        return Packer() if self.packed else lambda matrix: matrix
