"""Rows of the target's taps for a drafter."""

from __future__ import annotations

import gc
import weakref

import torch

from outrider.speculative.drafters.taps import KEPT_MAX, KEPT_ROWS_MAX, TapRows, tap_rows


def test_views_are_kept_for_memory_that_comes_back() -> None:
    rows, one, other = TapRows(), torch.randn(4, 6), torch.randn(4, 6)
    first = {run: rows.of(one, [run]) for run in ((0, 1), (0, 3), (2, 1))}
    for run, view in first.items():
        assert torch.equal(view, tap_rows(one, [run]))
        assert rows.of(one, [run]) is view
        assert torch.equal(rows.of(other, [run]), tap_rows(other, [run]))
        assert rows.of(one, [run]) is view
    one += 1
    assert torch.equal(rows.of(one, [(2, 1)]), one[2:3])
    assert torch.equal(rows.of(one, [(2, 1), (0, 2)]), one[[2, 0, 1]])


def test_taps_of_a_prompt_are_not_kept() -> None:
    rows = TapRows()
    taps = torch.randn(KEPT_ROWS_MAX + 1, 6)
    gone = weakref.ref(rows.of(taps, [(0, 2)]))
    gc.collect()
    assert gone() is None


def test_taps_that_are_new_in_every_step_are_not_kept() -> None:
    rows, gone = TapRows(), []
    with torch.inference_mode():
        for _step in range(5):
            taps = torch.randn(4, 6)
            gone.append(weakref.ref(rows.of(taps, [(1, 2)])))
            assert gone[-1]() is rows.of(taps, [(1, 2)])
            del taps
    gc.collect()
    assert [reference() is None for reference in gone] == [True] * 4 + [False]


def test_no_more_are_kept_than_may_be() -> None:
    rows, taps = TapRows(), [torch.randn(2, 6) for _ in range(KEPT_MAX + 5)]
    for each in taps:
        assert torch.equal(rows.of(each, [(1, 1)]), each[1:])
    assert len(rows._known) <= KEPT_MAX
