"""Root-mean-square norm of rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.kernels.compiling import OPTIONS, Kernel
from outrider.kernels.jobs import CHUNKS, OWN, set_word, word
from outrider.kernels.memory import load_f32
from outrider.kernels.vector import FLOAT32, LANES, add, fma, load_part, mul, splat, store_part, total

X, X_STRIDE, M, K, WEIGHT, EPS, OUT, OUT_STRIDE, RESIDUAL, RESIDUAL_STRIDE = range(OWN, OWN + 10)
"""EPS holds a float32; where there is a residual it is added."""
ROWS_PER_CHUNK = 16


@njit(**OPTIONS)
def norm_row(x, k, weight, eps, out, residual):
    squares = splat(np.float32(0.0))
    for at in range(0, k, LANES):
        values = load_part(x + 4 * at, k - at)
        squares = fma(values, values, squares)
    scale = splat(np.float32(1.0) / np.sqrt(total(squares) / np.float32(k) + eps))
    for at in range(0, k, LANES):
        y = mul(load_part(weight + 4 * at, k - at), mul(load_part(x + 4 * at, k - at), scale))
        if residual != 0:
            y = add(load_part(residual + 4 * at, k - at), y)
        store_part(out + 4 * at, y, k - at)


def norm(job, chunk, scratch):
    first = chunk * ROWS_PER_CHUNK
    residual = word(job, RESIDUAL)
    for row in range(first, min(first + ROWS_PER_CHUNK, word(job, M))):
        norm_row(
            word(job, X) + row * word(job, X_STRIDE),
            word(job, K),
            word(job, WEIGHT),
            load_f32(job + 8 * EPS),
            word(job, OUT) + row * word(job, OUT_STRIDE),
            residual + row * word(job, RESIDUAL_STRIDE) if residual != 0 else 0,
        )


NORM = Kernel(norm, FLOAT32)


@njit(**OPTIONS)
def plan_norm(job):
    set_word(job, CHUNKS, (word(job, M) + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
