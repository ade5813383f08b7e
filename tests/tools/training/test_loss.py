"""Losses and their weights, against plain formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tools.training.tiny import settings_for, trainer_of, write_corpus
from torch import Tensor
from torch.nn import functional

from outrider.tools.training.batches import decay_weights, dpace_weights
from outrider.tools.training.loss import HeadLoss


def plain_dpace(confidence: list[float], alpha: float) -> list[float]:
    k = len(confidence)
    weights = []
    for j in range(k):
        total = 0.0
        for m in range(j, k):
            product = 1.0
            for i in range(m + 1):
                product *= (1 - alpha) * confidence[i] + alpha
            total += product
        weights.append(total)
    return weights


def test_decay_weights_fall_as_the_formula_says() -> None:
    found = decay_weights(7, 4.0, torch.device("cpu"))
    assert found.tolist() == pytest.approx([math.exp(-(j - 1) / 4.0) for j in range(1, 8)])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_are_the_sum_of_products(alpha: float) -> None:
    confidence = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = dpace_weights(confidence, alpha)
    assert not found.requires_grad
    for stream in range(2):
        for anchor in range(3):
            expected = plain_dpace(confidence[stream, anchor].tolist(), alpha)
            assert found[stream, anchor].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(("chunk_rows", "in_parts"), [(4, False), (100, False), (4, True)])
def test_losses_and_gradients_are_those_of_cross_entropy(share: float, chunk_rows: int, in_parts: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(34, 8, generator=generator)
    # With a part of the head the loss is over its tokens alone.
    head = whole[::2]
    rows = torch.randn(10, 8, generator=generator, requires_grad=True)
    teacher = torch.randn(10, 8, generator=generator) if share else None
    labels = torch.randint(17, (10,), generator=generator)
    weights = torch.rand(10, generator=generator)

    plain = rows.detach().clone().requires_grad_()
    logits = plain @ head.T
    expected = functional.cross_entropy(logits, labels, reduction="none")
    if teacher is not None:
        soft = torch.softmax(teacher @ head.T, dim=-1)
        expected = (1 - share) * expected + share * functional.cross_entropy(logits, soft, reduction="none")
    (expected * weights).sum().backward()

    head_loss = HeadLoss(whole if in_parts else head, chunk_rows=chunk_rows, compiled=False)
    found = head_loss(rows, labels, teacher, share, part=head if in_parts else None)
    (found.losses * weights).sum().backward()
    torch.testing.assert_close(found.losses, expected)
    torch.testing.assert_close(rows.grad, plain.grad, rtol=1e-4, atol=1e-5)
    picked = torch.softmax(logits, dim=-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(found.confidence, picked)
    assert torch.equal(found.right, logits.argmax(-1) == labels)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_a_step_s_loss_is_the_weighted_mean_over_known_labels(weighting: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    settings = settings_for(tmp_path, "dflash", weighting=weighting, gamma=2.5)
    trainer = trainer_of(settings)
    batch = trainer._next_batch()
    known = batch.known.clone()
    known[:, ::3, 1:] = False
    batch = replace(batch, known=known)
    trainer._next_batch = lambda: batch  # type: ignore[method-assign]
    with torch.no_grad():
        logits = trainer.rows(batch) @ trainer.plan.head.T
    losses = functional.cross_entropy(logits.flatten(0, 2), batch.labels.flatten(), reduction="none").view(known.shape)
    confidence: Tensor = torch.exp(-losses)
    total = weight_sum = 0.0
    for stream in range(known.shape[0]):
        for anchor in range(known.shape[1]):
            if weighting == "decay":
                weights = [math.exp(-j / 2.5) for j in range(settings.k)]
            else:
                weights = plain_dpace(confidence[stream, anchor].tolist(), 0.5)
            for j in range(settings.k):
                if known[stream, anchor, j]:
                    total += weights[j] * float(losses[stream, anchor, j])
                    weight_sum += weights[j]
    assert float(trainer.train_step()["loss"]) == pytest.approx(total / weight_sum, rel=1e-4)
