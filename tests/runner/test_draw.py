"""The compiled draw and the plain one choose the same token, whatever the logits and settings."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.portable import row_key
from outrider.runner.draw import DrawSettings, draw, draw_compiled, draw_fused


def settings(device: str = "cpu", **columns: list[Any]) -> DrawSettings:
    dtypes = {"top_k": torch.int64, "key": torch.int64}
    tensors = {
        name: torch.tensor(values, dtype=dtypes.get(name, torch.float64), device=device)
        for name, values in columns.items()
    }
    return DrawSettings(filters=True, **tensors)


def compiled(logits: Tensor, chosen: DrawSettings) -> list[int]:
    tokens: list[int] = draw_compiled(logits, chosen).tolist()
    return tokens


def random_columns(rng: random.Random, num_rows: int, vocab_size: int) -> dict[str, list[Any]]:
    def column(*choices: float) -> list[Any]:
        return [rng.choice(choices) for _ in range(num_rows)]

    return {
        "temperature": column(1e-5, 0.1, 0.7, 1.0, 2.0, 1e6),
        "log_min_p": column(-math.inf, -math.inf, math.log(0.01), math.log(0.3), 0.0),
        "top_k": column(0, 0, 1, 2, 5, 40, vocab_size - 1, vocab_size),
        "top_p": column(1.0, 1.0, 0.9, 0.5, 0.1, 1e-9, 1e-300, 0.999999),
        "key": [row_key(rng.getrandbits(63), row) for row in range(num_rows)],
    }


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * rng.choice([1e-3, 1.0, 4.0, 30.0])
    shape = rng.randrange(5)
    if shape == 1:  # many equal ones, with both zeros among them
        logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.5, logits.round(), -0.0)
    elif shape == 2:
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -torch.inf
        logits[:, rng.randrange(vocab_size)] = 0.0
    elif shape == 3:
        logits[:, rng.randrange(vocab_size)] = 3.4e38
    elif shape == 4:
        logits = torch.zeros_like(logits)
    return logits


@pytest.mark.parametrize(("vocab_size", "rounds"), [(1, 2), (2, 10), (7, 40), (256, 30), (257, 30), (5000, 6)])
def test_compiled_and_plain_draw_agree(vocab_size: int, rounds: int) -> None:
    rng = random.Random(vocab_size)
    for _ in range(rounds):
        logits = random_logits(rng, 24, vocab_size)
        chosen = settings(**random_columns(rng, 24, vocab_size))
        assert compiled(logits, chosen) == draw(logits, chosen).tolist()


def test_they_agree_on_the_vocabulary_of_a_real_model() -> None:
    rng = random.Random(5)
    logits = torch.randn(24, 49_152, generator=torch.Generator().manual_seed(3)) * 2.5
    chosen = settings(**random_columns(rng, 24, 49_152))
    assert compiled(logits, chosen) == draw(logits, chosen).tolist()


def test_rows_that_do_not_lie_together_are_read_as_they_are() -> None:
    rng = random.Random(6)
    wide = torch.randn(8, 100, generator=torch.Generator().manual_seed(3))
    chosen = settings(**random_columns(rng, 8, 40))
    assert compiled(wide[:, 30:70], chosen) == compiled(wide[:, 30:70].clone(), chosen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocab_size", [7, 257, 49_152])
def test_the_gpu_draws_the_same_tokens(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    for _ in range(10):
        logits = random_logits(rng, 24, vocab_size)
        columns = random_columns(rng, 24, vocab_size)
        there = draw(logits.cuda(), settings("cuda", **columns)).tolist()
        assert there == compiled(logits, settings(**columns))
        assert there == draw_fused(logits.cuda(), settings("cuda", **columns)).tolist()
        free = columns | {"top_k": [0] * 24, "top_p": [1.0] * 24}
        plain = dataclasses.replace(settings("cuda", **free), filters=False)
        assert draw_fused(logits.cuda(), plain).tolist() == draw(logits.cuda(), plain).tolist()
        # One row takes other paths through sums and sorts on a GPU than many rows do.
        alone = {name: values[:1] for name, values in columns.items()}
        assert draw(logits[:1].cuda(), settings("cuda", **alone)).tolist() == there[:1]
