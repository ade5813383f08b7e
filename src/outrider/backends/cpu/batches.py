"""Batches of a few rows, in memory that is kept from step to step.

In the middle of a step, when its weights have evicted everything else from the processor's caches, allocating tensors
takes longer than all the arithmetic below. The rows of such a batch are therefore written, by a compiled function, into
the memory of an earlier batch of the same shape. Two batches take turns, so that a batch stays valid until the second
one after it: a pass may still be enqueued when the next batch is built.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.batch import Batch, BatchBuilder, BlockTableArrays, Span
from outrider.backends.cpu.kernels.batch_rows import (
    GROUP_ARRAYS,
    GROUP_WORDS,
    SHARED_ARRAYS,
    SPAN_WORDS,
    WRITE_ROWS,
)
from outrider.kv.layout import KVLayout

ROWS_MAX = 64
"""The most rows of a batch whose memory is kept."""
_SHAPES_MAX = 256
"""The most shapes of batches whose memory is kept."""


@dataclass(slots=True, eq=False)
class _PersistentBatch:
    """A batch and the memory that its tensors are views of."""

    layout: struct.Struct
    """The words that Python writes: spans and token ids."""
    memory: memoryview
    address: int
    batch: Batch
    group_words: npt.NDArray[np.int64]
    groups_address: int
    lows: npt.NDArray[np.int32]
    """Kept alive, because the words of the groups hold its address."""


class CPUBatchBuilder(BatchBuilder):
    def __init__(self, layout: KVLayout, tables: BlockTableArrays) -> None:
        super().__init__(layout, tables, torch.device("cpu"))
        self._persistent: dict[tuple[range, int, int], tuple[_PersistentBatch, _PersistentBatch]] = {}
        """The two batches that take turns, by groups, number of rows and number of spans. The one to be used next comes
        first; the shapes used last come last."""

    def build(self, spans: Sequence[Span], groups: range) -> Batch:
        numbers: list[int] = []
        token_ids: list[int] = []
        first_rows: list[int] = []
        for table_row, start, tokens, kept_from, sees_to, anchored in spans:
            numbers += (table_row, start, len(tokens), kept_from, sees_to, anchored)
            first_rows.append(len(token_ids))
            token_ids += tokens
        rows = len(token_ids)
        if not 0 < rows <= ROWS_MAX:
            return super().build(spans, groups)
        persistent = self._take_turns(groups, rows, len(spans))
        persistent.layout.pack_into(persistent.memory, 0, *numbers, *token_ids)
        within = WRITE_ROWS.call(persistent.address, len(spans), rows, persistent.groups_address, len(groups))
        if not within:
            raise IndexError(f"rows lie outside the block tables: {spans}")
        return persistent.batch._replace(first_rows=first_rows)

    def _take_turns(self, groups: range, rows: int, spans: int) -> _PersistentBatch:
        key = (groups, rows, spans)
        pair = self._persistent.pop(key, None)
        # Tables that have grown are new tensors.
        if pair is None or pair[0].batch.groups[0].block_tables is not self._tables.tensor(groups.start):
            pair = self._new(groups, rows, spans), self._new(groups, rows, spans)
            if len(self._persistent) >= _SHAPES_MAX:
                del self._persistent[next(iter(self._persistent))]
        current, following = pair
        self._persistent[key] = following, current
        return current

    def _new(self, groups: range, rows: int, spans: int) -> _PersistentBatch:
        arrays = SHARED_ARRAYS + GROUP_ARRAYS * len(groups)
        memory = np.zeros(SPAN_WORDS * spans + arrays * rows + 2 * spans + 1, np.int64)
        of_rows, query_start_loc, seq_lens = torch.from_numpy(memory)[SPAN_WORDS * spans :].split(
            (arrays * rows, spans + 1, spans)
        )
        token_ids, positions, table_rows, *of_groups = of_rows.view(arrays, rows).unbind()
        metadata = tuple(
            self._metadata_over(
                group, positions, table_rows, query_start_loc, seq_lens, of_groups[GROUP_ARRAYS * number :]
            )
            for number, group in enumerate(groups)
        )
        lows = self._tables.lows
        group_words = np.array([self._words_of(group, lows) for group in groups], np.int64)
        return _PersistentBatch(
            layout=struct.Struct(f"{SPAN_WORDS * spans + rows}q"),
            memory=memory.data.cast("B"),
            address=memory.ctypes.data,
            batch=Batch(token_ids=token_ids, groups=metadata, first_rows=[]),
            group_words=group_words,
            groups_address=group_words.ctypes.data,
            lows=lows,
        )

    def _words_of(self, group: int, lows: npt.NDArray[np.int32]) -> list[int]:
        spec, table = self._layout.groups[group], self._tables.tensor(group)
        assert table.dtype is torch.int32 and table.is_contiguous() and lows.dtype == np.int32
        words = [
            table.data_ptr(),
            table.shape[0],
            table.shape[1],
            spec.page_tokens,
            self._lookbacks[group],
            spec.causal,
            lows.ctypes.data + group * lows.strides[1],
            lows.strides[0],
        ]
        assert len(words) == GROUP_WORDS
        return words

    def _metadata_over(
        self,
        group: int,
        positions: Tensor,
        table_rows: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        of_group: Sequence[Tensor],
    ) -> AttentionMetadata:
        block_tables = self._tables.tensor(group)
        return AttentionMetadata(
            positions=positions,
            slot_mapping=of_group[0],
            table_rows=table_rows,
            block_tables=block_tables,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            first_key=of_group[1],
            stop_key=of_group[2],
            # The rows change from step to step, so the bound is the capacity of the tables.
            max_keys=block_tables.shape[1] * self._layout.groups[group].page_tokens,
        )
