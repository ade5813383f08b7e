"""Where the largest logit of each row is, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels.shares import largest_shares
from outrider.layers.cpu_ops import NumbaOps
from outrider.layers.ops import Greatest

SIZES = [1, 5, 17, 511, 1024, 1025, 16_384, 49_157]
NAN, INF = float("nan"), float("inf")


def searched(logits: Tensor, *, shares: bool = False) -> Greatest:
    ops = NumbaOps(threads=2)
    recorded = ops.record(torch.zeros(1), [], lambda _x: ops.greatest(logits, shares=shares))
    assert recorded is not None
    answer = recorded.run(torch.zeros(1), [])
    assert answer is not None
    return answer


def found(logits: Tensor) -> tuple[list[int], list[float]]:
    return searched(logits).read()


def check(logits: Tensor) -> None:
    places, values = found(logits)
    array = logits.numpy()
    assert places == array.argmax(axis=-1).tolist()
    assert np.array_equal(values, [row[place] for row, place in zip(array, places, strict=True)], equal_nan=True)


@pytest.mark.parametrize("count", SIZES)
def test_every_place_is_found(count: int) -> None:
    logits = torch.randn(64, count, generator=torch.Generator().manual_seed(count))
    check(logits)
    places = {0, count // 2, count - 1, max(0, count - count % 1024 - 1), min(count - 1, 1024)}
    for place in places:
        logits[3, place] = 100.0 + place
        check(logits)
    assert found(logits)[0][3] == count - 1


@pytest.mark.parametrize("count", SIZES)
def test_the_first_of_equal_ones(count: int) -> None:
    check(torch.zeros(2, count))
    check(torch.randint(-3, 3, (16, count), generator=torch.Generator().manual_seed(count)).float())
    signs = torch.full((1, count), -0.0)
    signs[0, count // 2 :] = 0.0
    check(signs)


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("count", SIZES)
def test_what_is_no_number_is_told(count: int, wrong: float) -> None:
    for place in {0, count // 3, count - 1}:
        logits = torch.randn(3, count, generator=torch.Generator().manual_seed(place))
        logits[1, place] = wrong
        check(logits)
        logits[1, count // 2] = INF
        check(logits)
        logits[1, count // 4] = NAN
        check(logits)
        assert math.isnan(found(logits)[1][1])
    check(torch.full((2, count), wrong))


def test_rows_need_not_lie_side_by_side() -> None:
    check(torch.randn(5, 3000)[:, 100:2900])


@pytest.mark.parametrize("count", SIZES)
def test_shares_come_with_it_where_they_are_wanted(count: int) -> None:
    logits = torch.randn(7, count, generator=torch.Generator().manual_seed(count)) * 5
    both = searched(logits, shares=True)
    assert both.shares() == largest_shares(logits).tolist()
    assert both.read() == found(logits)
    assert searched(logits).shares() is None


def test_a_call_by_itself_is_left_to_others() -> None:
    assert NumbaOps(threads=2).greatest(torch.zeros(2, 8)) is None
