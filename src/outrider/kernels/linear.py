"""x Wᵀ with what follows it: bias, residual, gated activation.

Weights are read once from memory: a thread takes a strip of weight rows and runs all rows of x over it, a few weight
rows at a time while few rows of x share the cache with them, or a few rows of x at a time where there are many.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from outrider.kernels.activations import NONE, gate
from outrider.kernels.compiling import OPTIONS, UNBOUND, Kernel, part
from outrider.kernels.jobs import CHUNKS, OWN, set_word, word
from outrider.kernels.tiles import COLUMNS, ROWS, dot_tile
from outrider.kernels.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LANES,
    add,
    load_part,
    part_loader,
    store_part,
)

(X, X_STRIDE, M, WEIGHTS, W_STRIDE, K, N, WIDTH, OUT, OUT_STRIDE, BIAS, RESIDUAL, RESIDUAL_STRIDE, ACTIVATION) = range(
    OWN, OWN + 14
)
"""Strides in bytes; addresses that are 0 stand for nothing. N is the width of the output, WIDTH that of a strip."""

FEW_ROWS = 32
"""Up to here all rows go over a weight tile before the next one is touched."""
WIDTH_MAX = 256
_X_CACHE_BYTES = 28 << 10
_W_CACHE_BYTES = 640 << 10
_TILES = ("_one", "_two", "_three", "_four")

# Bound anew for each way of storing weights.
_item = FLOAT32
_one = _two = _three = _four = _thin = _load_narrow = _widen_rows = _sums_of_float32 = _sums_of_narrow = UNBOUND


def scratch_bytes(k: int) -> int:
    """What a thread needs: two strips of sums, and a strip of widened weights."""
    return 2 * FEW_ROWS * WIDTH_MAX * 4 + max(_W_CACHE_BYTES, 2 * COLUMNS * k * 4) + 64


def _sums(x, x_stride, m, weights, w_stride, n, k, out, out_stride):
    """Plain products of m rows with n weight rows."""
    last = n - n % COLUMNS
    for column in range(0, last, COLUMNS):
        w, o = weights + column * w_stride, out + column * 4
        following = w + COLUMNS * w_stride
        row = 0
        while row + ROWS <= m:
            _four(x + row * x_stride, x_stride, w, w_stride, k, o + row * out_stride, out_stride, following)
            row += ROWS
        if m - row == 3:
            _three(x + row * x_stride, x_stride, w, w_stride, k, o + row * out_stride, out_stride, following)
        elif m - row == 2:
            _two(x + row * x_stride, x_stride, w, w_stride, k, o + row * out_stride, out_stride, following)
        elif m - row == 1:
            _one(x + row * x_stride, x_stride, w, w_stride, k, o + row * out_stride, out_stride, following)
    for column in range(last, n):
        w, o = weights + column * w_stride, out + column * 4
        for row in range(m):
            _thin(x + row * x_stride, x_stride, w, w_stride, k, o + row * out_stride, out_stride, w)


def _sums_for(item: int) -> Any:
    tiles = {name: dot_tile(rows, COLUMNS, item, ahead=True) for rows, name in enumerate(_TILES, 1)}
    return part(_sums, item, _thin=dot_tile(1, 1, item), **tiles)


def _widen(weights, w_stride, n, k, out, out_stride):
    """16-bit rows to float32 rows."""
    for row in range(n):
        w, o = weights + row * w_stride, out + row * out_stride
        for at in range(0, k, LANES):
            store_part(o + 4 * at, _load_narrow(w + 2 * at, k - at), k - at)


@njit(**OPTIONS)
def _finish(job, first_row, rows, first_column, columns, sums, stride):
    """From sums to output: bias, activation, residual. Up sums, if any, lie `rows` lines below the gate sums."""
    activation, bias, residual = word(job, ACTIVATION), word(job, BIAS), word(job, RESIDUAL)
    ups_below = rows * stride
    bias_gap = word(job, N) * 4
    for row in range(rows):
        s = sums + row * stride
        o = word(job, OUT) + (first_row + row) * word(job, OUT_STRIDE) + first_column * 4
        r = residual + (first_row + row) * word(job, RESIDUAL_STRIDE) + first_column * 4
        b = bias + first_column * 4
        for at in range(0, columns, LANES):
            count = min(LANES, columns - at)
            y = load_part(s + 4 * at, count)
            if bias != 0:
                y = add(y, load_part(b + 4 * at, count))
            if activation != NONE:
                up = load_part(s + ups_below + 4 * at, count)
                if bias != 0:
                    up = add(up, load_part(b + bias_gap + 4 * at, count))
                y = gate(activation, y, up)
            if residual != 0:
                y = add(load_part(r + 4 * at, count), y)
            store_part(o + 4 * at, y, count)


def linear(job, chunk, sums):
    """One strip of weight rows. `sums` is the thread's scratch memory."""
    m, k, n = word(job, M), word(job, K), word(job, N)
    first = chunk * word(job, WIDTH)
    columns = min(word(job, WIDTH), n - first)
    gated = word(job, ACTIVATION) != NONE
    stride = WIDTH_MAX * 4
    x_stride, w_stride = word(job, X_STRIDE), word(job, W_STRIDE)
    weights = word(job, WEIGHTS) + first * w_stride
    ups = weights + n * w_stride
    block = m
    if m > FEW_ROWS:
        block = min(FEW_ROWS, max(ROWS, _X_CACHE_BYTES // (4 * k) // ROWS * ROWS))
    widened = _item != FLOAT32 and m > ROWS
    if widened:
        # Once for all rows instead of once per tile.
        wide = sums + 2 * FEW_ROWS * stride
        _widen_rows(weights, w_stride, columns, k, wide, 4 * k)
        if gated:
            _widen_rows(ups, w_stride, columns, k, wide + columns * 4 * k, 4 * k)
        weights, ups, w_stride = wide, wide + columns * 4 * k, 4 * k
    for row in range(0, m, block):
        rows = min(block, m - row)
        x, up_sums = word(job, X) + row * x_stride, sums + rows * stride
        if _item == FLOAT32 or widened:
            _sums_of_float32(x, x_stride, rows, weights, w_stride, columns, k, sums, stride)
            if gated:
                _sums_of_float32(x, x_stride, rows, ups, w_stride, columns, k, up_sums, stride)
        else:
            _sums_of_narrow(x, x_stride, rows, weights, w_stride, columns, k, sums, stride)
            if gated:
                _sums_of_narrow(x, x_stride, rows, ups, w_stride, columns, k, up_sums, stride)
        _finish(job, row, rows, first, columns, sums, stride)


def _kernel(item: int) -> Kernel:
    names = {"_item": item, "_sums_of_float32": _SUMS_OF_FLOAT32, "_sums_of_narrow": _SUMS_OF_FLOAT32}
    names["_widen_rows"] = part(_widen, item, _load_narrow=part_loader(item))
    if item != FLOAT32:
        names["_sums_of_narrow"] = _sums_for(item)
    return Kernel(linear, item, **names)


_SUMS_OF_FLOAT32 = _sums_for(FLOAT32)
LINEAR = {item: _kernel(item) for item in (FLOAT32, BFLOAT16, FLOAT16)}


@njit(**OPTIONS)
def plan_linear(job, threads):
    """Strips: several for each thread, so that one that is held up leaves its share to the others."""
    n, k = word(job, N), word(job, K)
    width = (n + 8 * threads - 1) // (8 * threads)
    both = 2 if word(job, ACTIVATION) != NONE else 1
    width = min(width, WIDTH_MAX, _W_CACHE_BYTES // (4 * k * both))
    width = max(COLUMNS, width // COLUMNS * COLUMNS)
    set_word(job, WIDTH, width)
    set_word(job, CHUNKS, (n + width - 1) // width)
