"""Batches of a few rows of a single request, in memory that is kept from step to step.

In the middle of a step, when its weights have evicted everything else from the processor's caches, allocating tensors
takes longer than all the arithmetic below. The rows of such a batch are therefore written, number by number, into the
memory of an earlier batch of the same shape. Two batches take turns, so that a batch stays valid until the second one
after it: a pass may still be enqueued when the next batch is built.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.batch import FAR, Batch, BatchBuilder, BlockTableArrays, Span
from outrider.kv.layout import KVLayout

FEW_ROWS = 16
_SHARED_ARRAYS = 3
"""Number of arrays that all groups share: token ids, positions, table rows."""
_GROUP_ARRAYS = 3
"""Number of arrays of each group: slot mapping, first keys, stop keys."""


@dataclass(slots=True, eq=False)
class _PersistentBatch:
    """A batch and the memory that its tensors are views of."""

    layout: struct.Struct
    memory: memoryview
    batch: Batch


class CPUBatchBuilder(BatchBuilder):
    def __init__(self, layout: KVLayout, tables: BlockTableArrays) -> None:
        super().__init__(layout, tables, torch.device("cpu"))
        self._group_settings = [
            (spec.page_tokens, lookback, spec.causal)
            for spec, lookback in zip(layout.groups, self._lookbacks, strict=True)
        ]
        self._persistent: dict[tuple[int, int], tuple[_PersistentBatch, _PersistentBatch]] = {}
        """The two batches that take turns, by first group and number of rows. The one to be used next comes first."""

    def build(self, spans: Sequence[Span], groups: range) -> Batch:
        if len(spans) == 1 and len(spans[0].token_ids) <= FEW_ROWS:
            return self._build_one(spans[0], groups)
        return super().build(spans, groups)

    def _build_one(self, span: Span, groups: range) -> Batch:
        table_row, start, token_ids, kept_from, sees_to, anchored = span
        count = len(token_ids)
        end = start + count
        positions = range(start, end)
        numbers = [*token_ids, *positions, *[table_row] * count]
        tables, settings = self._tables, self._group_settings
        for group in groups:
            page_tokens, lookback, causal = settings[group]
            low = tables.low(group, table_row)
            nearest = start - lookback
            if anchored or (low >= end - 1 - lookback):
                first_keys = [low if low > nearest else nearest] * count
            else:
                first_keys = [max(low, p - lookback) for p in positions]
            stop_keys: Sequence[int] = range(start + 1, end + 1)
            if sees_to and not causal:
                stop_keys = [max(stop, sees_to) for stop in stop_keys]
                if lookback < FAR and not anchored:
                    stop_keys = [min(stop, p + lookback + 1) for stop, p in zip(stop_keys, positions, strict=True)]
            first_page = start // page_tokens
            pages = tables.pages(group, table_row, first_page, (end - 1) // page_tokens + 1)
            if kept_from <= start and len(pages) == 1:
                first_slot = start + (pages[0] - first_page) * page_tokens
                numbers += range(first_slot, first_slot + count)
            else:
                numbers += [
                    (pages[p // page_tokens - first_page] if p >= kept_from else 0) * page_tokens + p % page_tokens
                    for p in positions
                ]
            numbers += first_keys
            numbers += stop_keys
        numbers += (0, count, end)
        persistent = self._take_turns(groups, count)
        persistent.layout.pack_into(persistent.memory, 0, *numbers)
        return persistent.batch

    def _take_turns(self, groups: range, count: int) -> _PersistentBatch:
        key = (groups.start, count)
        pair = self._persistent.get(key)
        # Tables that have grown are new tensors.
        if pair is None or pair[0].batch.groups[0].block_tables is not self._tables.tensor(groups.start):
            pair = self._new(groups, count), self._new(groups, count)
        current, following = pair
        self._persistent[key] = following, current
        return current

    def _new(self, groups: range, count: int) -> _PersistentBatch:
        rows = _SHARED_ARRAYS + _GROUP_ARRAYS * len(groups)
        memory = np.zeros(rows * count + 3, np.int64)
        whole = torch.from_numpy(memory)
        token_ids, positions, table_rows, *of_groups = whole[: rows * count].view(rows, count).unbind()
        query_start_loc, seq_lens = whole[-3:-1], whole[-1:]
        metadata = tuple(
            self._metadata_over(
                group, positions, table_rows, query_start_loc, seq_lens, of_groups[_GROUP_ARRAYS * number :]
            )
            for number, group in enumerate(groups)
        )
        return _PersistentBatch(
            struct.Struct(f"{len(memory)}q"),
            memory.data.cast("B"),
            Batch(token_ids=token_ids, groups=metadata, first_rows=[0]),
        )

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
