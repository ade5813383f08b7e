"""Hidden states of the target's rows, for the rows a drafter is fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tap_rows(taps: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Taps of runs of rows (first, count) one after the other: [rows, taps * hidden]."""
    first, count = runs[0]
    if len(runs) == 1:
        return taps[first : first + count]
    return taps[torch.tensor([row for first, count in runs for row in range(first, first + count)], device=taps.device)]
