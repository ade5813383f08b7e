"""The recorded argmax of each row of logits, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.backends.cases import random
from torch import Tensor

from outrider.backends.base import Argmax
from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.kernels.probability import largest_probabilities

SIZES = [1, 5, 17, 511, 1024, 1025, 16_384, 49_157]
NAN, INF = float("nan"), float("inf")


def recorded(logits: Tensor, *, probabilities: bool = False) -> Argmax:
    """Returns the argmax as a recorded pass computes it; what it is given does not matter."""
    backend = CPUBackend(threads=2)
    compiled = backend.compile_pass(lambda _x, _groups, _: backend.argmax(logits, probabilities=probabilities))
    return compiled.run(torch.zeros(1), (), 0)


def check(logits: Tensor) -> None:
    token_ids, values = recorded(logits).read()
    array = logits.numpy()
    assert token_ids == array.argmax(axis=-1).tolist()
    assert np.array_equal(values, array[range(len(array)), token_ids], equal_nan=True)


@pytest.mark.parametrize("count", SIZES)
def test_the_largest_is_found_at_every_place(count: int) -> None:
    logits = random(count, 64, count)
    check(logits)
    for place in {0, count // 2, count - 1, max(0, count - count % 1024 - 1), min(count - 1, 1024)}:
        logits[3, place] = 100.0 + place
        check(logits)


@pytest.mark.parametrize("count", SIZES)
def test_of_equal_logits_the_first_is_found(count: int) -> None:
    check(torch.zeros(2, count))
    check(random(count, 16, count).mul(2).round())
    signs = torch.full((1, count), -0.0)
    signs[0, count // 2 :] = 0.0
    check(signs)


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("count", SIZES)
def test_nan_and_infinities_are_found(count: int, wrong: float) -> None:
    for place in {0, count // 3, count - 1}:
        logits = random(place, 3, count)
        logits[1, place] = wrong
        check(logits)
        logits[1, count // 2] = INF
        check(logits)
        logits[1, count // 4] = NAN
        check(logits)
        assert math.isnan(recorded(logits).read()[1][1])
    check(torch.full((2, count), wrong))


def test_rows_may_be_part_of_wider_ones() -> None:
    check(random(0, 5, 3000)[:, 100:2900])


@pytest.mark.parametrize("count", SIZES)
def test_probabilities_are_those_of_the_same_logits(count: int) -> None:
    logits = random(count, 7, count) * 5
    found = recorded(logits, probabilities=True)
    assert found.probabilities() == largest_probabilities(logits)
    assert found.read() == recorded(logits).read()
