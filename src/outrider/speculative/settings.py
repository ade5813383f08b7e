"""What a drafter is loaded for: the target, the operations, the pages, the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.backends.base import Backend
from outrider.models.load import LoadedModel
from outrider.models.parameters import Matrix
from outrider.models.weight_forms import DENSE, WeightForms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrafterSettings:
    target: LoadedModel
    backend: Backend
    page_tokens: int
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    forms: WeightForms = DENSE
    """The forms in which the backend keeps weights that a file stores in fewer bits than `dtype`."""
    packed: bool = False
    """Matrices of 16 bits are kept in 8: half the memory to read, and slightly fewer drafts are accepted."""
    draft_vocab_size: int | None = None
    """Number of tokens to draft from, the most frequent ones; 0: all; None: what is fastest on this device."""
    most_drafts: int | None = None
    """Most drafts that any request will ask for; None: as many as the drafter is made for."""
    progress: Callable[[str, int, int], None] | None = None
    """Called with what is being loaded, the amount done and the total."""
    taps: tuple[int, ...] | None = None
    """Target layers to read instead of those that the checkpoint names, to find out which ones are right."""

    def fingerprint(self, weights: str) -> str:
        """The fingerprint of a drafter with these weights. Its KV also depends on the layers it reads and on how its
        weights are stored."""
        taps = "" if self.taps is None else f"/taps {','.join(map(str, self.taps))}"
        return f"{weights}{taps}{'/coarse' if self.packed else ''}"

    def packer(self) -> Callable[[Matrix], Matrix]:
        """Returns the function that a drafter applies, when it is loaded, to its embedding and to matrices that
        multiply taps, a few elements of which may be far larger than all others."""
        return self.backend.compact if self.packed else lambda matrix: matrix

    def coarsener(self) -> Callable[[Matrix], Matrix]:
        """Returns the function that a drafter applies to all its other matrices."""
        if not self.packed:
            return lambda matrix: matrix
        coarsen = self.backend.coarsen
        return lambda matrix: coarsen(matrix) if matrix.dtype.itemsize == 2 else matrix
