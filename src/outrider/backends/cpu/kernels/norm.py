"""Preparation of rows for a product: root-mean-square norm and quantisation."""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.backends.cpu.kernels.coarse import narrow_row_coarsely
from outrider.backends.cpu.kernels.compiling import OPTIONS, Kernel
from outrider.backends.cpu.kernels.jobs import CHUNKS, OWN, set_word, word
from outrider.backends.cpu.kernels.memory import load_f32
from outrider.backends.cpu.kernels.narrow import narrow_row
from outrider.backends.cpu.kernels.vector import FLOAT32, LANES, add, fma, load_part, mul, splat, store_part, total

(X, X_STRIDE, M, K, WEIGHT, EPS, OUT, OUT_STRIDE, RESIDUAL, RESIDUAL_STRIDE, NARROWED, NARROWED_STRIDE, COARSELY) = (
    range(OWN, OWN + 13)
)
"""Words of a norm's job; an address of 0 means that there is none. EPS holds a float32. RESIDUAL is added to the
result. NARROWED is where the quantised result is written: for coarse weights if COARSELY is not 0, else for packed
blocks. Without a WEIGHT, rows are quantised without a norm."""
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
            target = narrowed + row * word(job, NARROWED_STRIDE)
            if word(job, COARSELY) != 0:
                narrow_row_coarsely(out, k, target)
            else:
                narrow_row(out, k, target)


NORM = Kernel(norm, FLOAT32)


@njit(**OPTIONS)
def plan_norm(job):
    set_word(job, CHUNKS, (word(job, M) + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
