"""Rows of one forward pass, ragged over requests, and what each group must know about them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kv.groups import GroupKind
from outrider.kv.layout import KVLayout
from outrider.layers.attention import AttentionRows
from outrider.layers.rows import Rows, Span
from outrider.runner.tables import TableLines

Int64Array = npt.NDArray[np.int64]
FAR = 1 << 40
"""A position past every window's length."""
FEW_ROWS = 16


class Batcher:
    """Turns spans into rows. No Python work per row: spans are joined, then everything is arithmetic on arrays."""

    def __init__(self, layout: KVLayout, tables: TableLines, device: torch.device) -> None:
        self._layout = layout
        self._tables = tables
        self._device = device
        self._here = device.type == "cpu"
        self._reaches = [reach_of(spec.kind) for spec in layout.groups]
        self._facts = [
            (spec.page_tokens, reach, spec.causal) for spec, reach in zip(layout.groups, self._reaches, strict=True)
        ]
        self._few: dict[tuple[int, int, bool], FewNumbers] = {}
        """By first group, number of rows, and whether there are others in use."""

    def rows(self, spans: Sequence[Span], groups: range, *, beside: bool = False) -> Rows:
        if len(spans) == 1 and len(spans[0].tokens) <= FEW_ROWS:
            return self._few_rows(spans[0], groups, beside)
        return self._many_rows(spans, groups)

    def _few_rows(self, span: Span, groups: range, beside: bool = False) -> Rows:
        """The same for a single request's step, number by number: arrays of a few elements cost more than that."""
        line, start, own_tokens, kept_from, sees_to, anchored = span
        count = len(own_tokens)
        end = start + count
        positions = range(start, end)
        numbers = [*own_tokens, *positions, *[line] * count]
        tables, facts = self._tables, self._facts
        most_keys = []
        for group in groups:
            page_tokens, reach, causal = facts[group]
            low = tables.low(group, line)
            nearest = start - reach
            if anchored or (low >= end - 1 - reach):
                first_keys = [low if low > nearest else nearest] * count
            else:
                first_keys = [max(low, p - reach) for p in positions]
            stops: Sequence[int] = range(start + 1, end + 1)
            if sees_to and not causal:
                stops = [max(stop, sees_to) for stop in stops]
                if reach < FAR and not anchored:
                    stops = [min(stop, p + reach + 1) for stop, p in zip(stops, positions, strict=True)]
            first_page = start // page_tokens
            pages = tables.pages(group, line, first_page, (end - 1) // page_tokens + 1)
            if kept_from <= start and len(pages) == 1:
                first_slot = start + (pages[0] - first_page) * page_tokens
                numbers += range(first_slot, first_slot + count)
            else:
                numbers += [
                    (pages[p // page_tokens - first_page] if p >= kept_from else 0) * page_tokens + p % page_tokens
                    for p in positions
                ]
            numbers += first_keys
            numbers += stops
            most_keys.append(max(map(sub, stops, first_keys)))
        if not self._here:
            return self._few_objects(self._tensor(np.array(numbers, np.int64).reshape(-1, count)), groups, most_keys)
        # They are those of the last time with other numbers in them: in the middle of a step, whose weights have just
        # gone through all caches, making some takes longer than all that is reckoned above.
        few = self._few.get((groups.start, count, beside))
        if few is None or few.rows.groups[0].tables is not self._tables.tensor(groups.start):
            array = np.zeros((len(numbers) // count, count), np.int64)
            rows = self._few_objects(torch.from_numpy(array), groups, most_keys)._replace(kept=True)
            few = self._few[groups.start, count, beside] = FewNumbers(
                struct.Struct(f"{len(numbers)}q"), array.data.cast("B"), rows
            )
        few.layout.pack_into(few.memory, 0, *numbers)
        for of_group, most in zip(few.rows.groups, most_keys, strict=True):
            of_group.renew(most)
        return few.rows

    def _few_objects(self, numbers: Tensor, groups: range, most_keys: Sequence[int]) -> Rows:
        tokens, at, lines, *own = numbers.unbind()
        found = tuple(
            AttentionRows(
                positions=at,
                slots=own[3 * number],
                sequence=lines,
                tables=self._tables.tensor(group),
                first_key=own[3 * number + 1],
                stop_key=own[3 * number + 2],
                most_keys=most_keys[number],
            )
            for number, group in enumerate(groups)
        )
        return Rows(tokens=tokens, groups=found, first_row=[0])

    def _many_rows(self, spans: Sequence[Span], groups: range) -> Rows:
        counts = np.array([len(span.tokens) for span in spans], np.int64)
        ends = np.cumsum(counts)
        first_row = ends - counts
        within = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(first_row, counts)
        positions = within + np.repeat(np.array([span.start for span in spans], np.int64), counts)
        lines = np.repeat(np.array([span.line for span in spans], np.int64), counts)
        kept = positions >= np.repeat(np.array([span.kept_from for span in spans], np.int64), counts)
        tokens = np.concatenate([np.asarray(span.tokens, np.int64) for span in spans])
        blocks = None
        if any(span.sees_to or span.anchored for span in spans):
            sees_to = np.repeat(np.array([span.sees_to for span in spans], np.int64), counts)
            anchored = np.repeat(np.array([span.anchored for span in spans], np.bool_), counts)
            blocks = Blocks(sees_to, anchored, np.where(anchored, positions - within, positions))
        shared = (self._tensor(positions), self._tensor(lines))
        return Rows(
            tokens=self._tensor(tokens),
            groups=tuple(self._group(group, positions, lines, kept, blocks, shared) for group in groups),
            first_row=first_row.tolist(),
        )

    def _group(
        self,
        group: int,
        positions: Int64Array,
        lines: Int64Array,
        kept: npt.NDArray[np.bool_],
        blocks: Blocks | None,
        shared: tuple[Tensor, Tensor],
    ) -> AttentionRows:
        spec, table = self._layout.groups[group], self._tables.array(group)
        number, offset = np.divmod(positions, spec.page_tokens)
        # The sink is page 0: rows that are not kept write there.
        slots = np.where(kept, table[lines, number].astype(np.int64), 0) * spec.page_tokens + offset
        reach = self._reaches[group]
        first_keys = (positions if blocks is None else blocks.windows_at) - reach
        first_keys = np.maximum(first_keys, self._tables.lows[lines, group])
        stops = positions + 1
        if blocks is not None and not spec.causal:
            stops = blocks.stops(reach, positions)
        return AttentionRows(
            positions=shared[0],
            slots=self._tensor(slots),
            sequence=shared[1],
            tables=self._tables.tensor(group),
            first_key=self._tensor(first_keys),
            stop_key=self._tensor(stops),
            most_keys=int((stops - first_keys).max()),
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


class FewNumbers(NamedTuple):
    """Memory that is written as plain numbers and read as rows."""

    layout: struct.Struct
    memory: memoryview
    rows: Rows


class Blocks(NamedTuple):
    """What rows of blocks that attend both ways see beyond themselves. Per row."""

    sees_to: Int64Array
    anchored: npt.NDArray[np.bool_]
    windows_at: Int64Array
    """The position that a window is measured from."""

    def stops(self, reach: int, positions: Int64Array) -> Int64Array:
        stops = np.maximum(positions + 1, self.sees_to)
        if reach < FAR:
            # A window that moves with its row is as long ahead as it is behind.
            stops = np.where(self.anchored, stops, np.minimum(stops, positions + reach + 1))
        return stops


def reach_of(kind: GroupKind) -> int:
    """How far back a row reads: a kind is a fixed distance, or everything, which is FAR."""
    return FAR - kind.first_key(FAR)
