"""The softmax of attention scores."""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.backends.cpu.kernels.activations import tanh
from outrider.backends.cpu.kernels.compiling import OPTIONS
from outrider.backends.cpu.kernels.memory import store_f32
from outrider.backends.cpu.kernels.vector import (
    LANES,
    add,
    exp,
    keep,
    largest,
    load_part,
    maximum,
    mul,
    splat,
    store_part,
    sub,
    total,
)

_ZERO, _LOWEST = np.float32(0.0), np.float32(-np.inf)


@njit(inline="always")
def exponential(x):
    return largest(exp(splat(x)))


@njit(**OPTIONS)
def weights_of_scores(scores, count, softcap, result):
    """Replaces scores with exp(score - largest) in place. Writes the largest score and the sum of weights to
    `result`."""
    most = splat(_LOWEST)
    for at in range(0, count, LANES):
        values = load_part(scores + 4 * at, count - at)
        if softcap != _ZERO:
            values = mul(tanh(mul(values, splat(np.float32(1.0) / softcap))), splat(softcap))
            store_part(scores + 4 * at, values, count - at)
        most = maximum(keep(values, count - at, _LOWEST), most)
    highest = largest(most)
    sums = splat(_ZERO)
    for at in range(0, count, LANES):
        weights = exp(sub(load_part(scores + 4 * at, count - at), splat(highest)))
        store_part(scores + 4 * at, weights, count - at)
        sums = add(sums, keep(weights, count - at, _ZERO))
    store_f32(result, highest)
    store_f32(result + 4, total(sums))
