"""The probability of the largest logit, against PyTorch's softmax."""

from __future__ import annotations

import pytest
import torch
from tests.backends.cases import random

from outrider.backends.cpu.kernels.probability import largest_probabilities


@pytest.mark.parametrize("count", [1, 5, 16, 17, 160, 16_384, 49_157])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_it_is_that_of_softmax(count: int, spread: float) -> None:
    logits = random(count, 7, count) * spread - 5.0
    expected = logits.softmax(dim=-1).amax(dim=-1).tolist()
    assert largest_probabilities(logits) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_logits_of_minus_infinity_have_no_probability() -> None:
    logits = torch.full((2, 100), float("-inf"))
    logits[0, 3], logits[1, 7], logits[1, 90] = 2.0, -1.0, -1.0
    assert largest_probabilities(logits) == pytest.approx([1.0, 0.5])


def test_rows_may_have_gaps() -> None:
    logits = random(0, 3, 64)[:, ::2]
    assert largest_probabilities(logits) == pytest.approx(logits.softmax(dim=-1).amax(dim=-1).tolist())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 20, 99])
def test_it_is_nan_for_logits_that_are_not_finite(wrong: float, at: int) -> None:
    logits = random(0, 3, 100)
    logits[1, at] = wrong
    assert torch.tensor(largest_probabilities(logits)).isnan().tolist() == [False, True, False]
    assert torch.tensor(largest_probabilities(torch.full((1, 100), float("-inf")))).isnan().all()
