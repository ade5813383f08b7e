"""Draws on a real model's vocabulary, and on a GPU in batches of other sizes."""

from __future__ import annotations

import random

import pytest
import torch
from tests.backends.draws import random_columns, random_logits, settings

from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.reference.draw import draw


def test_compiled_and_plain_draw_agree_on_the_vocabulary_of_a_real_model() -> None:
    logits = torch.randn(24, 49_152, generator=torch.Generator().manual_seed(3)) * 2.5
    chosen = settings(random_columns(random.Random(5), 24, 49_152))
    assert CPUBackend(1).draw(logits, chosen).tolist() == draw(logits, chosen).tolist()


def test_rows_may_be_part_of_wider_ones() -> None:
    wide = torch.randn(8, 100, generator=torch.Generator().manual_seed(3))
    chosen = settings(random_columns(random.Random(6), 8, 40))
    tokens = [CPUBackend(1).draw(logits, chosen).tolist() for logits in (wide[:, 30:70], wide[:, 30:70].clone())]
    assert tokens[0] == tokens[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocab_size", [7, 257, 49_152])
def test_the_reference_draws_the_same_tokens_on_a_gpu(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    for _ in range(10):
        logits, columns = random_logits(rng, 24, vocab_size), random_columns(rng, 24, vocab_size)
        there = draw(logits.cuda(), settings(columns, "cuda")).tolist()
        assert there == CPUBackend(1).draw(logits, settings(columns)).tolist()
        # One row takes other paths through sums and sorts on a GPU than many rows do.
        alone = {name: values[:1] for name, values in columns.items()}
        assert draw(logits[:1].cuda(), settings(alone, "cuda")).tolist() == there[:1]
