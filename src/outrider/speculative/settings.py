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
    packed: bool = False
    """Matrices that a file stores packed stay so."""
    progress: Callable[[str, int, int], None] | None = None
