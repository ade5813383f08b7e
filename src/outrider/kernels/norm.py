"""What is done to rows before a product: root-mean-square norm, narrowing."""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.kernels.compiling import OPTIONS, Kernel
from outrider.kernels.jobs import CHUNKS, OWN, set_word, word
from outrider.kernels.memory import load_f32
from outrider.kernels.narrow import narrow_row
from outrider.kernels.vector import FLOAT32, LANES, add, fma, load_part, mul, splat, store_part, total

X, X_STRIDE, M, K, WEIGHT, EPS, OUT, OUT_STRIDE, RESIDUAL, RESIDUAL_STRIDE, NARROWED, NARROWED_STRIDE = range(
    OWN, OWN + 12
)
"""EPS holds a float32; where there is a residual it is added. NARROWED: where to leave the result as whole numbers, or
0. Without a WEIGHT there is no norm: rows are narrowed as they are."""
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
    k, residual, narrowed = word(job, K), word(job, RESIDUAL), word(job, NARROWED)
    for row in range(first, min(first + ROWS_PER_CHUNK, word(job, M))):
        out = word(job, X) + row * word(job, X_STRIDE)
        if word(job, WEIGHT) != 0:
            x, out = out, word(job, OUT) + row * word(job, OUT_STRIDE)
            residual_row = residual + row * word(job, RESIDUAL_STRIDE) if residual != 0 else 0
            norm_row(x, k, word(job, WEIGHT), load_f32(job + 8 * EPS), out, residual_row)
        if narrowed != 0:
            narrow_row(out, k, narrowed + row * word(job, NARROWED_STRIDE))


NORM = Kernel(norm, FLOAT32)


@njit(**OPTIONS)
def plan_norm(job):
    set_word(job, CHUNKS, (word(job, M) + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
