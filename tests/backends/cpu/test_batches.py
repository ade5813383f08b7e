"""The CPU backend's batches lie in memory that is used again: when, and when not."""

from __future__ import annotations

import pytest
import torch
from tests.backends.cases import FakeTables
from tests.backends.test_contract import batch_layout, same_batch

from outrider.backends.batch import BatchBuilder, Span
from outrider.backends.cpu.batches import CPUBatchBuilder

SPANS = [Span(table_row=1, start=start, token_ids=[start, 2, 3]) for start in (20, 50, 90, 120)]


def builders() -> tuple[CPUBatchBuilder, BatchBuilder, FakeTables]:
    layout = batch_layout()
    tables = FakeTables(layout, requests=2, max_model_len=200, seed=1)
    return CPUBatchBuilder(layout, tables), BatchBuilder(layout, tables, torch.device("cpu")), tables


def test_a_batch_survives_the_next_one() -> None:
    """A pass may still be enqueued when the next batch is built."""
    builder, plain, _ = builders()
    before = None
    for span in SPANS:
        batch = builder.build([span], range(2))
        if before is not None:
            same_batch(before[1], plain.build([before[0]], range(2)))
        same_batch(batch, plain.build([span], range(2)))
        before = span, batch


def test_batches_of_other_groups_and_other_numbers_of_rows_are_left_alone() -> None:
    builder, plain, _ = builders()
    first = builder.build([SPANS[0]], range(2))
    for span in SPANS:
        builder.build([span], range(2, 4))
        builder.build([span._replace(token_ids=[1, 2])], range(2))
    same_batch(first, plain.build([SPANS[0]], range(2)))


def test_rows_outside_the_tables_are_refused() -> None:
    """Compiled code would read other memory."""
    builder, _, _ = builders()
    for wrong in ({"start": 199}, {"start": -1}, {"table_row": 2}, {"table_row": -1}):
        with pytest.raises(IndexError, match="outside the block tables"):
            builder.build([SPANS[0], SPANS[1]._replace(**wrong)], range(2))
        builder.build([SPANS[0], SPANS[1]], range(2))


def test_batches_follow_the_tables_when_those_grow() -> None:
    builder, plain, tables = builders()
    for _ in range(3):
        for span in SPANS:
            same_batch(builder.build([span], range(2)), plain.build([span], range(2)))
        tables.grow()
