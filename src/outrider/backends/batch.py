"""Batches: the rows of one forward pass, ragged over requests, with metadata for each KV group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.kv.groups import GroupKind
from outrider.kv.layout import KVLayout

Int64Array = npt.NDArray[np.int64]
FAR = 1 << 40
"""A position beyond the length of any window."""


class Span(NamedTuple):
    """Consecutive rows of one request: tokens at positions [start, start + len(token_ids))."""

    table_row: int
    """The request's row in the block tables."""
    start: int
    token_ids: Sequence[int]
    kept_from: int = 0
    """Keys and values of positions below this one go to the null page."""
    sees_to: int = 0
    """In groups that are not causal, every row reads the keys below this position: a block that attends both ways."""
    anchored: bool = False
    """Whether the windows of all rows are measured from the first row of the span."""


class Batch(NamedTuple):
    token_ids: Tensor
    """int64 [rows], on the backend's device"""
    groups: tuple[AttentionMetadata, ...]
    """The metadata of each KV group, in the order of the groups asked for."""
    first_rows: list[int]
    """The first row of each span: `query_start_loc` without its end, on the host."""


class BlockTableArrays(Protocol):
    """The block tables of all groups as arrays, which the runner maintains."""

    @property
    def lows(self) -> npt.NDArray[np.int32]:
        """[table rows, groups]: the first position of each request that is valid in each group."""

    def array(self, group: int) -> npt.NDArray[np.int32]:
        """Returns the block table of a group on the host: [table rows, pages]."""

    def tensor(self, group: int) -> Tensor:
        """Returns the block table of a group on the device."""


class BatchBuilder:
    """Turns spans into batches. No Python runs per row: spans are joined, then everything is arithmetic on arrays."""

    def __init__(self, layout: KVLayout, tables: BlockTableArrays, device: torch.device) -> None:
        self._layout = layout
        self._tables = tables
        self._device = device
        self._lookbacks = [lookback_of(spec.kind) for spec in layout.groups]

    def build(self, spans: Sequence[Span], groups: range) -> Batch:
        """Returns the rows of all spans, with the metadata of the groups in this range of the layout."""
        counts = np.array([len(span.token_ids) for span in spans], np.int64)
        query_start_loc = np.concatenate([[0], np.cumsum(counts)])
        first_rows = query_start_loc[:-1]
        within = np.arange(int(query_start_loc[-1]), dtype=np.int64) - np.repeat(first_rows, counts)
        positions = within + np.repeat(np.array([span.start for span in spans], np.int64), counts)
        table_rows = np.repeat(np.array([span.table_row for span in spans], np.int64), counts)
        kept = positions >= np.repeat(np.array([span.kept_from for span in spans], np.int64), counts)
        token_ids = np.concatenate([np.asarray(span.token_ids, np.int64) for span in spans])
        seq_lens = np.array([span.start for span in spans], np.int64) + counts
        blocks = None
        if any(span.sees_to or span.anchored for span in spans):
            sees_to = np.repeat(np.array([span.sees_to for span in spans], np.int64), counts)
            anchored = np.repeat(np.array([span.anchored for span in spans], np.bool_), counts)
            blocks = _Blocks(sees_to, anchored, np.where(anchored, positions - within, positions))
        shared = _Shared(*map(self._tensor, (positions, table_rows, query_start_loc, seq_lens)))
        return Batch(
            token_ids=self._tensor(token_ids),
            groups=tuple(self._metadata(group, positions, table_rows, kept, blocks, shared) for group in groups),
            first_rows=first_rows.tolist(),
        )

    def _metadata(
        self,
        group: int,
        positions: Int64Array,
        table_rows: Int64Array,
        kept: npt.NDArray[np.bool_],
        blocks: _Blocks | None,
        shared: _Shared,
    ) -> AttentionMetadata:
        spec, table = self._layout.groups[group], self._tables.array(group)
        number, offset = np.divmod(positions, spec.page_tokens)
        # The null page is page 0: rows that are not kept write there.
        slot_mapping = np.where(kept, table[table_rows, number].astype(np.int64), 0) * spec.page_tokens + offset
        lookback = self._lookbacks[group]
        first_keys = (positions if blocks is None else blocks.windows_at) - lookback
        first_keys = np.maximum(first_keys, self._tables.lows[table_rows, group])
        stop_keys = positions + 1
        if blocks is not None and not spec.causal:
            stop_keys = blocks.stop_keys(lookback, positions)
        return AttentionMetadata(
            positions=shared.positions,
            slot_mapping=self._tensor(slot_mapping),
            table_rows=shared.table_rows,
            block_tables=self._tables.tensor(group),
            query_start_loc=shared.query_start_loc,
            seq_lens=shared.seq_lens,
            first_key=self._tensor(first_keys),
            stop_key=self._tensor(stop_keys),
            max_keys=int((stop_keys - first_keys).max()),
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


class _Shared(NamedTuple):
    """The tensors that the metadata of all groups have in common."""

    positions: Tensor
    table_rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class _Blocks(NamedTuple):
    """The keys that rows of blocks attending both ways read beyond their own, with one entry for each row."""

    sees_to: Int64Array
    anchored: npt.NDArray[np.bool_]
    windows_at: Int64Array
    """The position that a row's window is measured from."""

    def stop_keys(self, lookback: int, positions: Int64Array) -> Int64Array:
        stop_keys = np.maximum(positions + 1, self.sees_to)
        if lookback < FAR:
            # A window that moves with its row is as long ahead as it is behind.
            stop_keys = np.where(self.anchored, stop_keys, np.minimum(stop_keys, positions + lookback + 1))
        return stop_keys


def lookback_of(kind: GroupKind) -> int:
    """Returns how many positions back a row reads in a group of this kind; FAR where it reads them all."""
    return FAR - kind.first_key(FAR)
