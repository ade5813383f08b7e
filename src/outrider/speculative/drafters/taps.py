"""Hidden states of the target's rows, for the rows a drafter is fed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT_ROWS_MAX = 16
"""Those of a prompt take megabytes."""
KEPT_MAX = 256


class TapRows:
    """The same for a few rows, quicker: a step taps into the memory of an earlier one, so that a view of it is kept."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], dict[tuple[int, int], Tensor]]] = {}
        """Views of taps that somebody else keeps too: others are new in every step."""

    def of(self, taps: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        if len(runs) > 1 or taps.shape[0] > KEPT_ROWS_MAX:
            return tap_rows(taps, runs)
        known = self._known.get(id(taps))
        if known is None or known[0]() is not taps:
            self._forget_gone()
            known = self._known[id(taps)] = (weakref.ref(taps), {})
        view = known[1].get(runs[0])
        if view is None:
            view = known[1][runs[0]] = tap_rows(taps, runs)
        return view

    def _forget_gone(self) -> None:
        for key in [key for key, (taps, _views) in self._known.items() if taps() is None]:
            del self._known[key]
        if len(self._known) >= KEPT_MAX:
            self._known.clear()


def tap_rows(taps: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Taps of runs of rows (first, count) one after the other: [rows, taps * hidden]."""
    first, count = runs[0]
    if len(runs) == 1:
        return taps[first : first + count]
    return taps[torch.tensor([row for first, count in runs for row in range(first, first + count)], device=taps.device)]
