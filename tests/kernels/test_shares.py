"""The share of the largest logit, against PyTorch's softmax."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.shares import largest_shares


@pytest.mark.parametrize("count", [1, 5, 16, 17, 160, 16_384, 49_157])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_as_softmax(count: int, spread: float) -> None:
    logits = torch.randn(7, count, generator=torch.Generator().manual_seed(count)) * spread - 5.0
    assert torch.allclose(largest_shares(logits), logits.softmax(dim=-1).amax(dim=-1), rtol=1e-5, atol=1e-7)


def test_tokens_that_cannot_be_drafted_take_no_share() -> None:
    logits = torch.full((2, 100), float("-inf"))
    logits[0, 3], logits[1, 7], logits[1, 90] = 2.0, -1.0, -1.0
    assert largest_shares(logits).tolist() == pytest.approx([1.0, 0.5])


def test_rows_need_not_lie_side_by_side() -> None:
    wide = torch.randn(3, 64)
    assert torch.allclose(largest_shares(wide[:, ::2]), wide[:, ::2].softmax(dim=-1).amax(dim=-1))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 20, 99])
def test_logits_that_are_no_numbers_have_no_share(wrong: float, at: int) -> None:
    logits = torch.randn(3, 100)
    logits[1, at] = wrong
    assert largest_shares(logits).isnan().tolist() == [False, True, False]
    assert largest_shares(torch.full((1, 100), float("-inf"))).isnan().tolist() == [True]
