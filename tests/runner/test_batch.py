"""Rows of a single request are made number by number, those of many by arithmetic on arrays: one result."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kv.fakes import drafter, full, sliding

from outrider.kv import KVLayout
from outrider.kv.plan import KVPlan, PageAssignment
from outrider.layers.rows import Rows, Span
from outrider.runner.batch import FEW_ROWS, Batcher
from outrider.runner.tables import TableLines

WINDOW = 6


def batcher(rng: random.Random) -> Batcher:
    target = (full("a", page=4), sliding(WINDOW, "b", page=3))
    draft = [replace(group, causal=False) for group in (full("c", page=8), sliding(WINDOW, "d", page=5))]
    layout = KVLayout(target=target, footprint=drafter("dflash", *draft))
    tables = TableLines(layout, max_model_len=200, device=torch.device("cpu"))
    assignments = []
    for group, spec in enumerate(layout.groups):
        for sequence in ("x", "y"):
            pages = [rng.randrange(1, 99) for _ in range(200 // spec.page_tokens)]
            low = rng.choice((0, 0, 7)) if group == 3 else 0
            assignments.append(PageAssignment(sequence, group, 0, tuple(pages), low))
    tables.apply(KVPlan(step=0, assignments=tuple(assignments)))
    return Batcher(layout, tables, torch.device("cpu"))


def same(one: Rows, other: Rows) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert one.first_row == other.first_row
    for a, b in zip(one.groups, other.groups, strict=True):
        assert a.most_keys == b.most_keys
        for name in ("positions", "slots", "sequence", "tables", "first_key", "stop_key"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype, name
            assert torch.equal(x, y), name


def test_rows_that_are_kept_follow_the_tables_when_those_grow() -> None:
    of = batcher(random.Random(1))
    span = Span(line=1, start=20, tokens=[1, 2, 3], kept_from=0)
    before = of.rows([span], range(2))
    assert of.rows([span], range(2)) is before
    more = [PageAssignment(f"more {number}", 0, 0, (number,), 0) for number in range(20)]
    of._tables.apply(KVPlan(step=1, assignments=tuple(more)))
    after = of.rows([span], range(2))
    same(after, of._many_rows([span], range(2)))
    assert after.groups[0].tables.shape[0] > before.groups[0].tables.shape[0]
    assert after.groups is not before.groups


def test_rows_beside_others_leave_those_alone() -> None:
    of = batcher(random.Random(1))
    for first in (20, 90):
        one, other = (Span(line=1, start=start, tokens=[start, 2, 3], kept_from=0) for start in (first, first + 30))
        fed, block = of.rows([one], range(2), beside=True), of.rows([other], range(2))
        same(fed, of._many_rows([one], range(2)))
        same(block, of._many_rows([other], range(2)))


@pytest.mark.parametrize("seed", range(60))
def test_few_rows_are_as_many_rows_would_be(seed: int) -> None:
    rng = random.Random(seed)
    of = batcher(rng)
    for _ in range(8):
        start, count = rng.randrange(0, 150), rng.randint(1, FEW_ROWS)
        block = rng.random() < 0.5
        span = Span(
            line=rng.randrange(2),
            start=start,
            tokens=[rng.randrange(256) for _ in range(count)],
            kept_from=rng.choice((0, start + rng.randint(0, count))),
            sees_to=start + count if block else 0,
            anchored=block and rng.random() < 0.5,
        )
        for groups in (range(2), range(2, 4)):
            same(of._few_rows(span, groups), of._many_rows([span], groups))
            same(of.rows([span], groups), of._many_rows([span], groups))
