"""Random logits and settings for draws."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from outrider.backends.drawing import DrawSettings
from outrider.backends.keyed_noise import row_key


def settings(columns: dict[str, list[Any]], device: torch.device | str = "cpu") -> DrawSettings:
    dtypes = {"top_k": torch.int64, "key": torch.int64}
    tensors = {
        name: torch.tensor(values, dtype=dtypes.get(name, torch.float64), device=device)
        for name, values in columns.items()
    }
    return DrawSettings(filters=any(columns["top_k"]) or min(columns["top_p"]) < 1, **tensors)


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
    if shape == 1:  # many equal logits, with both zeros among them
        logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.5, logits.round(), -0.0)
    elif shape == 2:
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -torch.inf
        logits[:, rng.randrange(vocab_size)] = 0.0
    elif shape == 3:
        logits[:, rng.randrange(vocab_size)] = 3.4e38
    elif shape == 4:
        logits = torch.zeros_like(logits)
    return logits
