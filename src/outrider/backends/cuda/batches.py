"""Batches for the GPU: one upload for each batch, padded to a size that a graph may exist for.

All numbers of a batch lie in one tensor of 64-bit words:

    | token ids | positions | table rows | group 0: slots, first keys, stop keys | … | query_start_loc | seq_lens |
      rows        rows        rows         3 * rows                                   spans + 1         spans

Rows and spans are padded. A row of the padding writes to the null page and reads no key. Block tables stay on the
device; of these, a batch uploads the entries that have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.batch import Batch, BatchBuilder, BlockTableArrays, Int64Array, Span
from outrider.kv.layout import KVLayout

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The numbers of rows and of spans that batches are padded to. Larger batches are not padded, and have no graphs."""
SPAN_ROWS_MAX = 32
"""The most rows of a span in a padded batch: more come from prompts, whose lengths hardly repeat."""
_TABLE_ROWS = 1024
"""Rows that a block table on the device has room for at first. A graph is lost when its table moves."""
_SHARED, _OF_GROUP = 3, 3


class Shape(NamedTuple):
    """The padded shape of a batch: all that a launch may depend on."""

    rows: int
    spans: int
    uniform: int
    """The number of rows of every span; 0 where spans differ."""
    span_rows: int
    """The most rows that a span may have."""
    groups: range


class PackedBatch(NamedTuple):
    words: Tensor
    """int64, as drawn above"""
    shape: Shape
    padded: bool
    """Whether the shape is one that graphs are captured for."""
    tables: tuple[Tensor, ...]
    """The block table of each group, with all rows that there is room for."""

    def metadata(self, words: Tensor, rows: int, spans: int, page_tokens: Sequence[int]) -> tuple[CudaMetadata, ...]:
        """Returns the metadata of the first `rows` rows over words that are laid out as these are."""
        columns, starts, lens = split(words, self.shape)
        return tuple(
            CudaMetadata.over(
                self,
                positions=columns[1][:rows],
                slot_mapping=columns[_SHARED + _OF_GROUP * number][:rows],
                table_rows=columns[2][:rows],
                block_tables=table,
                query_start_loc=starts[: spans + 1],
                seq_lens=lens[:spans],
                first_key=columns[_SHARED + _OF_GROUP * number + 1][:rows],
                stop_key=columns[_SHARED + _OF_GROUP * number + 2][:rows],
                max_keys=table.shape[1] * page_tokens[number],
            )
            for number, table in enumerate(self.tables)
        )


class CudaMetadata(AttentionMetadata):
    """The metadata of a batch that lies in one tensor."""

    __slots__ = ("packed",)
    packed: PackedBatch

    @classmethod
    def over(cls, packed: PackedBatch, **fields: object) -> CudaMetadata:
        metadata = cls(**fields)  # type: ignore[arg-type]
        object.__setattr__(metadata, "packed", packed)
        return metadata

    @property
    def uniform(self) -> int:
        return self.packed.shape.uniform

    @property
    def span_rows(self) -> int:
        return self.packed.shape.span_rows


def words_of(shape: Shape) -> int:
    columns = _SHARED + _OF_GROUP * len(shape.groups)
    return columns * shape.rows + 2 * shape.spans + 1


def split(words: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the columns of rows, [columns, rows], then query_start_loc and seq_lens."""
    columns = _SHARED + _OF_GROUP * len(shape.groups)
    of_rows, starts, lens = words.split((columns * shape.rows, shape.spans + 1, shape.spans))
    return of_rows.view(columns, shape.rows), starts, lens


def padded_size(number: int) -> int | None:
    """Returns the size that this number of rows or spans is padded to; None beyond the largest."""
    return next((size for size in SIZES if size >= number), None)


def shape_of(rows: int, spans: int, longest: int, groups: range) -> tuple[Shape, bool]:
    """Returns the shape of a batch, and whether it is padded."""
    padded_rows, padded_spans = padded_size(rows), padded_size(spans)
    if padded_rows is None or padded_spans is None or longest > SPAN_ROWS_MAX:
        return Shape(rows, spans, 0, longest, groups), False
    if rows == spans:
        return Shape(padded_rows, padded_rows, 1, 1, groups), True
    if spans == 1:
        return Shape(padded_rows, 1, padded_rows, padded_rows, groups), True
    most = next(size for size in (2, 4, 8, 16, 32) if size >= longest)
    return Shape(padded_rows, padded_spans, 0, most, groups), True


class CudaBatchBuilder(BatchBuilder):
    def __init__(self, layout: KVLayout, tables: BlockTableArrays, device: torch.device) -> None:
        super().__init__(layout, tables, device)
        self._pins = device.type == "cuda"
        self._mirrors = [_Mirror(device) for _ in layout.groups]
        self._page_tokens = [spec.page_tokens for spec in layout.groups]

    def build(self, spans: Sequence[Span], groups: range) -> Batch:
        numbers: list[int] = []
        token_list: list[int] = []
        for table_row, start, tokens, kept_from, sees_to, anchored in spans:
            numbers += (table_row, start, len(tokens), kept_from, sees_to, anchored)
            token_list += tokens
        of_spans = np.array(numbers, np.int64).reshape(-1, 6)
        tables, starts, counts = of_spans[:, 0], of_spans[:, 1], of_spans[:, 2]
        ends = np.cumsum(counts)
        rows, count = int(ends[-1]), len(spans)
        shape, padded = shape_of(rows, count, int(counts.max()), groups)
        # The allocator of pinned memory gives nothing away that a copy still reads.
        words = torch.empty(words_of(shape), dtype=torch.int64, pin_memory=self._pins)
        words.numpy()[:] = 0
        columns, query_start_loc, seq_lens = (part.numpy() for part in split(words, shape))
        first_rows = ends - counts
        query_start_loc[1 : count + 1] = ends
        query_start_loc[count + 1 :] = rows
        seq_lens[:count] = starts + counts
        of_row = np.repeat(np.arange(count), counts) if rows > count else slice(None)
        positions = starts if rows == count else np.arange(rows, dtype=np.int64) + (starts - first_rows)[of_row]
        token_ids, all_positions, all_table_rows = columns[:_SHARED, :rows]
        token_ids[:] = token_list
        all_positions[:], all_table_rows[:] = positions, tables[of_row]
        kept = positions >= of_spans[:, 3][of_row] if of_spans[:, 3].any() else None
        sees = windows_at = anchored_rows = None
        if of_spans[:, 4:].any():
            sees, anchored_rows = of_spans[:, 4][of_row], of_spans[:, 5][of_row] != 0
            windows_at = np.where(anchored_rows, starts[of_row], positions)
        furthest = max(int(seq_lens.max()), 0 if sees is None else int(sees.max()))
        on_device = []
        for number, group in enumerate(groups):
            spec, on_host = self._layout.groups[group], self._tables.array(group)
            on_device.append(self._mirrors[group].update(on_host, tables, -(-furthest // spec.page_tokens)))
            page, offset = np.divmod(positions, spec.page_tokens)
            pages = on_host[all_table_rows, page].astype(np.int64)
            if kept is not None:
                # The null page is page 0: rows that are not kept write there.
                pages *= kept
            slot_mapping, first_key, stop_key = columns[_SHARED + _OF_GROUP * number :][:_OF_GROUP, :rows]
            slot_mapping[:] = pages * spec.page_tokens + offset
            lookback = self._lookbacks[group]
            at = positions if windows_at is None else windows_at
            np.maximum(at - lookback, self._tables.lows[all_table_rows, group], out=first_key)
            stop_key[:] = positions + 1
            if sees is not None and anchored_rows is not None and not spec.causal:
                stop_key[:] = stop_keys(positions, sees, anchored_rows, lookback)
        there = words.to(self._device, non_blocking=True) if self._pins else words
        full = tuple(table for table, _rows in on_device)
        packed = PackedBatch(there, shape, padded, full)
        page_tokens = self._page_tokens[groups.start : groups.stop]
        metadata = packed.metadata(there, rows, count, page_tokens)
        for each, (table, table_rows) in zip(metadata, on_device, strict=True):
            object.__setattr__(each, "block_tables", table[:table_rows])
        return Batch(token_ids=there[:rows], groups=metadata, first_rows=first_rows.tolist())


class _Mirror:
    """The block table of a group on the device, and what it holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._held = np.zeros((0, 0), np.int32)

    def update(self, table: npt.NDArray[np.int32], rows: Int64Array, width: int) -> tuple[Tensor, int]:
        """Brings the first `width` entries of these rows up to date. Returns the table with all rows that there is
        room for, and the number of those that are in use."""
        if len(table) > len(self._table) or table.shape[1] != self._table.shape[1]:
            room = max(_TABLE_ROWS, 2 * len(table))
            self._held = np.zeros((room, table.shape[1]), np.int32)
            self._held[: len(table)] = table
            self._table = torch.from_numpy(self._held.copy()).to(self._device)
            return self._table, len(table)
        wanted = table[rows, :width]
        changed, columns = np.nonzero(wanted != self._held[rows, :width])
        if len(changed):
            at = rows[changed] * table.shape[1] + columns
            values = wanted[changed, columns]
            self._held.reshape(-1)[at] = values
            both = torch.from_numpy(np.stack([at, values.astype(np.int64)]))
            if self._device.type == "cuda":
                both = both.pin_memory().to(self._device, non_blocking=True)
            self._table.view(-1)[both[0]] = both[1].to(torch.int32)
        return self._table, len(table)


def stop_keys(positions: Int64Array, sees_to: Int64Array, anchored: npt.NDArray[np.bool_], lookback: int) -> Int64Array:
    """Returns where the keys end that rows of blocks attending both ways read."""
    found: Int64Array = np.maximum(positions + 1, sees_to)
    # A window that moves with its row is as long ahead as it is behind.
    return np.where(anchored, found, np.minimum(found, positions + lookback + 1))
