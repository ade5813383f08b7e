"""Page tables as arrays: one line per sequence and group, kept up to date from plans."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kv.layout import KVLayout
from outrider.kv.plan import KVPlan

Int32Array = npt.NDArray[np.int32]


class TableLines:
    """Lines are given to sequences as plans first mention them, and taken back when plans forget them."""

    def __init__(self, layout: KVLayout, *, max_model_len: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        # One step's scratch may lie past the model's limit, so one more page.
        self._widths = [-(-max_model_len // spec.page_tokens) + 1 for spec in layout.groups]
        self._arrays: list[Int32Array] = [np.zeros((0, width), np.int32) for width in self._widths]
        self.lows: Int32Array = np.zeros((0, len(layout.groups)), np.int32)
        self._note_views()
        self._line_of: dict[str, int] = {}
        self._unused: list[int] = []
        self._changed = True
        self._tensors: list[Tensor] = []

    def apply(self, plan: KVPlan) -> None:
        for sequence in plan.forgotten:
            line = self._line_of.pop(sequence, None)
            if line is not None:
                self._unused.append(line)
        for change in plan.assignments:
            line = self._line_of.get(change.sequence, -1)
            if line < 0:
                line = self._new_line(change.sequence)
            stop = change.first_page + len(change.pages)
            row = self._arrays[change.group][line]
            row[change.first_page : stop] = change.pages
            row[stop:] = 0
            self.lows[line, change.group] = change.low
            self._changed = True

    def _new_line(self, sequence: str) -> int:
        if not self._unused:
            self._grow()
        line = self._line_of[sequence] = self._unused.pop()
        for array in self._arrays:
            array[line] = 0
        self.lows[line] = 0
        return line

    def _grow(self) -> None:
        have = len(self.lows)
        more = max(16, have)
        self._arrays = [np.concatenate([a, np.zeros((more, a.shape[1]), np.int32)]) for a in self._arrays]
        self.lows = np.concatenate([self.lows, np.zeros((more, self.lows.shape[1]), np.int32)])
        self._note_views()
        self._unused = list(range(have + more - 1, have - 1, -1))
        self._changed = True
        self._tensors = []

    def _note_views(self) -> None:
        """For single numbers, which NumPy takes a while to get at."""
        self._views = [array.reshape(-1).data for array in self._arrays]
        self._view_of_lows = self.lows.reshape(-1).data

    def pages(self, group: int, line: int, first: int, end: int) -> list[int]:
        """Of pages [first, end) of a line."""
        start = line * self._widths[group]
        return self._views[group][start + first : start + end].tolist()

    def low(self, group: int, line: int) -> int:
        return self._view_of_lows[line * len(self._widths) + group]

    def line(self, sequence: str) -> int:
        return self._line_of[sequence]

    def array(self, group: int) -> Int32Array:
        return self._arrays[group]

    def tensor(self, group: int) -> Tensor:
        """The lines of a group where the model runs."""
        if self._device.type == "cpu":
            if not self._tensors:
                self._tensors = [torch.from_numpy(array) for array in self._arrays]
        elif self._changed or not self._tensors:
            self._tensors = [torch.from_numpy(array).to(self._device) for array in self._arrays]
            self._changed = False
        return self._tensors[group]
