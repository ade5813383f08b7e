"""Batches say which slot every row writes and which keys it reads, as the spans that they are built from say it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from tests.backends.cases import FakeTables
from tests.kv.fakes import drafter, full, sliding

from outrider.backends.batch import BatchBuilder, Span
from outrider.backends.cpu.batches import CPUBatchBuilder
from outrider.kv import KVLayout

MAX_LEN = 64


class Row(NamedTuple):
    token: int
    position: int
    table_row: int
    slot: int
    first_key: int
    stop_key: int


def layout() -> KVLayout:
    """Windows of 1 and pages of 1 are the smallest that there are."""
    target = (full("a", page=4), sliding(6, "b", page=3), sliding(1, "c", page=1))
    both_ways = (full("d", page=1), sliding(4, "e", page=5), sliding(1, "f", page=2))
    draft = (*(replace(group, causal=False) for group in both_ways), sliding(4, "g", page=8))
    return KVLayout(target=target, footprint=drafter("block_from_taps", *draft))


WINDOWS = (None, 6, 1, None, 4, 1, 4)


def expected_rows(span: Span, group: int, tables: FakeTables) -> list[Row]:
    spec, window = layout().groups[group], WINDOWS[group]
    rows = []
    for offset, token in enumerate(span.token_ids):
        position = span.start + offset
        page = tables.pages(group, span.table_row, 0, MAX_LEN)[position // spec.page_tokens]
        slot = (page if position >= span.kept_from else 0) * spec.page_tokens + position % spec.page_tokens
        low = tables.low(group, span.table_row)
        measured_from = span.start if span.anchored else position
        first = low if window is None else max(low, measured_from - (window - 1))
        stop = position + 1
        if not spec.causal:
            stop = max(stop, span.sees_to)
            if window is not None and not span.anchored:
                stop = min(stop, position + window)
        rows.append(Row(token, position, span.table_row, slot, first, stop))
    return rows


def random_span(rng: random.Random) -> Span:
    count = rng.choice((1, 2, 3, 9))
    start = rng.randrange(MAX_LEN - 16)
    return Span(
        table_row=rng.randrange(3),
        start=start,
        token_ids=[rng.randrange(99) for _ in range(count)],
        kept_from=rng.choice((0, start, start + 1, start + count)),
        # Beyond the span, at its end, within it, or not at all.
        sees_to=rng.choice((start + count + 2, start + count, start + 1, 0)),
        anchored=rng.random() < 0.5,
    )


def plain_builder(tables: FakeTables) -> BatchBuilder:
    return BatchBuilder(layout(), tables, torch.device("cpu"))


def cpu_builder(tables: FakeTables) -> BatchBuilder:
    return CPUBatchBuilder(layout(), tables)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("make", [plain_builder, cpu_builder])
def test_rows_write_and_read_what_their_spans_say(make: Callable[[FakeTables], BatchBuilder], seed: int) -> None:
    rng = random.Random(seed)
    tables = FakeTables(layout(), requests=3, max_model_len=2 * MAX_LEN, seed=seed)
    builder = make(tables)
    spans = [random_span(rng) for _ in range(rng.choice((1, 1, 2, 5)))]
    groups = rng.choice((range(3), range(3, 7), range(7), range(4, 5)))
    batch = builder.build(spans, groups)
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + len(span.token_ids))
    assert batch.first_rows == starts[:-1]
    for group, metadata in zip(groups, batch.groups, strict=True):
        columns = (batch.token_ids, metadata.positions, metadata.table_rows, metadata.slot_mapping)
        found = zip(*(c.tolist() for c in (*columns, metadata.first_key, metadata.stop_key)), strict=True)
        rows = [row for span in spans for row in expected_rows(span, group, tables)]
        assert list(found) == rows
        assert metadata.max_keys >= max(row.stop_key - row.first_key for row in rows)
        assert metadata.query_start_loc.tolist() == starts
        assert metadata.seq_lens.tolist() == [span.start + len(span.token_ids) for span in spans]
        assert metadata.block_tables is tables.tensor(group)
