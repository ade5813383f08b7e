"""Block tables as arrays: one row per sequence and group, kept up to date from plans."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kv.layout import KVLayout
from outrider.kv.plan import PageAssignment

Int32Array = npt.NDArray[np.int32]


class BlockTables:
    """Sequences get a table row when a plan first assigns pages to them, and lose it when a plan forgets them."""

    def __init__(self, layout: KVLayout, *, max_model_len: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        # One step's scratch may lie past the model's limit, so one more page.
        widths = [-(-max_model_len // spec.page_tokens) + 1 for spec in layout.groups]
        self._arrays: list[Int32Array] = [np.zeros((0, width), np.int32) for width in widths]
        self.lows: Int32Array = np.zeros((0, len(layout.groups)), np.int32)
        """[table rows, groups]: the first position of each sequence that may be read in each group."""
        self._row_of: dict[str, int] = {}
        self._unused: list[int] = []
        self._changed = True
        self._tensors: list[Tensor] = []

    # ---- changes, from KVPlan.apply_to ---------------------------------------------------------------

    def drop(self, sequence: str) -> None:
        table_row = self._row_of.pop(sequence, None)
        if table_row is not None:
            self._unused.append(table_row)

    def assign(self, change: PageAssignment) -> None:
        table_row = self._row_of.get(change.sequence, -1)
        if table_row < 0:
            table_row = self._new_row(change.sequence)
        stop = change.first_page + len(change.pages)
        pages = self._arrays[change.group][table_row]
        pages[change.first_page : stop] = change.pages
        pages[stop:] = 0
        self.lows[table_row, change.group] = change.low
        self._changed = True

    def _new_row(self, sequence: str) -> int:
        if not self._unused:
            self._grow()
        table_row = self._row_of[sequence] = self._unused.pop()
        for array in self._arrays:
            array[table_row] = 0
        self.lows[table_row] = 0
        return table_row

    def _grow(self) -> None:
        have = len(self.lows)
        more = max(16, have)
        self._arrays = [np.concatenate([a, np.zeros((more, a.shape[1]), np.int32)]) for a in self._arrays]
        self.lows = np.concatenate([self.lows, np.zeros((more, self.lows.shape[1]), np.int32)])
        self._unused = list(range(have + more - 1, have - 1, -1))
        self._changed = True
        self._tensors = []

    # ---- reading -------------------------------------------------------------------------------------

    def row_of(self, sequence: str) -> int:
        """Returns the table row of a sequence."""
        return self._row_of[sequence]

    def low(self, group: int, table_row: int) -> int:
        """Returns the first position that may be read in a group."""
        return int(self.lows[table_row, group])

    def array(self, group: int) -> Int32Array:
        """Returns the block table of a group on the host: [table rows, pages]."""
        return self._arrays[group]

    def tensor(self, group: int) -> Tensor:
        """Returns the block table of a group on the device that the model runs on."""
        if self._device.type == "cpu":
            if not self._tensors:
                self._tensors = [torch.from_numpy(array) for array in self._arrays]
        elif self._changed or not self._tensors:
            self._tensors = [torch.from_numpy(array).to(self._device) for array in self._arrays]
            self._changed = False
        return self._tensors[group]


class SequenceTables:
    """Block tables by sequence id, in the form that the sanitizer reads."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def table(self, sequence: str, group: int) -> list[int]:
        """Returns all pages of a sequence in one group, with the null page where there is none."""
        pages: list[int] = self._tables.array(group)[self._tables.row_of(sequence)].tolist()
        return pages

    def low(self, sequence: str, group: int) -> int:
        return self._tables.low(group, self._tables.row_of(sequence))
