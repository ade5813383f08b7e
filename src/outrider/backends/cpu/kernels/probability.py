"""The softmax probability of the largest logit of each row."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from outrider.backends.cpu.kernels.compiling import OPTIONS, Entry
from outrider.backends.cpu.kernels.memory import store_f32
from outrider.backends.cpu.kernels.vector import (
    LANES,
    add,
    exp,
    keep,
    largest,
    load,
    load_part,
    maximum,
    splat,
    sub,
    total,
)

_ZERO, _LOWEST, _ONE = np.float32(0.0), np.float32(-np.inf), np.float32(1.0)


@njit(**OPTIONS)
def largest_probability(row, count):
    """Returns the softmax probability of the largest of `count` float32 logits."""
    whole = count - count % LANES
    most = splat(_LOWEST)
    for at in range(0, whole, LANES):
        most = maximum(load(row + 4 * at), most)
    if whole < count:
        most = maximum(keep(load_part(row + 4 * whole, count - whole), count - whole, _LOWEST), most)
    highest = splat(largest(most))
    sums = splat(_ZERO)
    for at in range(0, whole, LANES):
        sums = add(sums, exp(sub(load(row + 4 * at), highest)))
    if whole < count:
        rest = exp(sub(load_part(row + 4 * whole, count - whole), highest))
        sums = add(sums, keep(rest, count - whole, _ZERO))
    return _ONE / total(sums)


def probabilities(logits, rows, count, out):
    for row in range(rows):
        store_f32(out + 4 * row, largest_probability(logits + 4 * row * count, count))


PROBABILITIES = Entry(probabilities, "void(int64, int64, int64, int64)")


def largest_probabilities(logits: Tensor) -> list[float]:
    """Returns the probability of each row's largest logit: float32 [rows, tokens] in."""
    logits = logits.contiguous()
    rows, count = logits.shape
    out = torch.empty(rows)
    PROBABILITIES.call(logits.data_ptr(), rows, count, out.data_ptr())
    found: list[float] = out.tolist()
    return found
