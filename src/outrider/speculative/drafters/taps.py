"""Hidden states of the target's rows, for the rows a drafter is fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KEPT_ROWS_MAX = 16
"""Those of a prompt take megabytes."""
KEPT_MAX = 256


class TapRows:
    """The same for a few rows, quicker: a step taps into the memory of an earlier one, so that a view of it is kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, int]], tuple[Tensor, Tensor]] = {}

    def of(self, taps: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        if len(runs) > 1:
            return tap_rows(taps, runs)
        key = (id(taps), runs[0])
        known = self._known.get(key)
        if known is None or known[0] is not taps:
            known = (taps, tap_rows(taps, runs))
            if taps.shape[0] <= KEPT_ROWS_MAX:
                if len(self._known) >= KEPT_MAX:
                    self._known.clear()
                self._known[key] = known
        return known[1]


def tap_rows(taps: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Taps of runs of rows (first, count) one after the other: [rows, taps * hidden]."""
    first, count = runs[0]
    if len(runs) == 1:
        return taps[first : first + count]
    return taps[torch.tensor([row for first, count in runs for row in range(first, first + count)], device=taps.device)]
