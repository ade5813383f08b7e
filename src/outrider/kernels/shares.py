"""The share of the largest logit in a softmax, for each row of logits."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from outrider.kernels.compiling import OPTIONS, Entry
from outrider.kernels.memory import store_f32
from outrider.kernels.vector import LANES, add, exp, keep, largest, load, load_part, maximum, splat, sub, total

_ZERO, _LOWEST, _ONE = np.float32(0.0), np.float32(-np.inf), np.float32(1.0)


@njit(**OPTIONS)
def share(row, count):
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


def shares(logits, rows, count, out):
    for row in range(rows):
        store_f32(out + 4 * row, share(logits + 4 * row * count, count))


SHARES = Entry(shares, "void(int64, int64, int64, int64)")


def largest_shares(logits: Tensor) -> Tensor:
    """float32 [rows, tokens] to float32 [rows]."""
    logits = logits.contiguous()
    rows, count = logits.shape
    out = torch.empty(rows)
    SHARES.call(logits.data_ptr(), rows, count, out.data_ptr())
    return out
