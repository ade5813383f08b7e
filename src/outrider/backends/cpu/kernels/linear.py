"""x Wᵀ, fused with the bias, residual or gated activation that follows it.

Weights are read from memory once: a thread takes a strip of weight rows and multiplies all rows of x with it. 16-bit
weights are converted to float32 in registers where one tile holds all rows of x; otherwise once for all rows, a few
weight rows at a time, in the L1 cache. Packed weights are multiplied as integers with rows of x that were quantised
before.
"""

from __future__ import annotations

import math

from numba import njit

from outrider.backends.cpu.kernels.activations import NONE, gate
from outrider.backends.cpu.kernels.coarse import coarse_tile
from outrider.backends.cpu.kernels.compiling import OPTIONS, UNBOUND, Kernel, part
from outrider.backends.cpu.kernels.jobs import CHUNKS, OWN, set_word, word
from outrider.backends.cpu.kernels.narrow import BLOCK
from outrider.backends.cpu.kernels.packed import INTERLEAVED, LINE_BYTES, PACKED, packed_tile
from outrider.backends.cpu.kernels.packed import ROWS as PACKED_ROWS
from outrider.backends.cpu.kernels.tiles import COLUMNS, COLUMNS_OF_ONE, COLUMNS_OF_TWO, ROWS, dot_tile
from outrider.backends.cpu.kernels.vector import (
    BFLOAT16,
    COARSE,
    FLOAT16,
    FLOAT32,
    LANES,
    add,
    load_part,
    loader,
    part_loader,
    store,
    store_part,
)

(X, X_STRIDE, M, WEIGHTS, W_STRIDE, K, N, WIDTH, OUT, OUT_STRIDE, BIAS, RESIDUAL, RESIDUAL_STRIDE, ACTIVATION) = range(
    OWN, OWN + 14
)
"""Words of the job. Strides are in bytes; an address of 0 means that there is none. N is the width of the output, WIDTH
that of a strip. With packed weights, X holds quantised rows."""

_X_CACHE_BYTES = 288 << 10
_SUMS_BYTES = 128 << 10
_WIDTH_MAX = 256
_WIDTH_STEP = math.lcm(COLUMNS, COLUMNS_OF_ONE, COLUMNS_OF_TWO, INTERLEAVED)
_ROWS_MAX = 256
_TILES = ("_one", "_two", "_three", "_four", "_five", "_six", "_seven", "_eight")

# Number of weight rows in a tile, by its number of rows of x: as many as fit into registers.
_FLOAT_COLUMNS = (COLUMNS_OF_ONE, COLUMNS_OF_TWO, *[COLUMNS] * (ROWS - 2))

# Bound by `part` and `Kernel` for each element type of weights.
_item = FLOAT32
_one = _two = _three = _four = _five = _six = _seven = _eight = _thin = UNBOUND
_few = _many = _rest = _load_whole = _load_narrow = _widen_rows = _sums_of = _tile = UNBOUND


def scratch_bytes(k: int) -> int:
    """Returns the scratch bytes of a thread: the sums of a block of rows with a strip, and the widened weights of a
    tile."""
    return _SUMS_BYTES + COLUMNS * k * 4 + 64


@njit(**OPTIONS)
def _rows_per_block(m, k):
    """Returns the number of rows of x that stay in the cache while a strip is read."""
    return min(m, max(ROWS, min(_ROWS_MAX, _X_CACHE_BYTES // (4 * k)) // ROWS * ROWS))


def _few_sums(x, x_stride, m, weights, w_stride, n, k, out, out_stride):
    """Multiplies the rows of one tile with n weight rows. Memory bandwidth is the limit here: a tile takes weight rows
    that are spread over the strip, so that the hardware prefetcher follows that many streams."""
    columns = _FLOAT_COLUMNS[m - 1]
    streams = n // columns
    w_step, o_step = streams * w_stride, streams * 4
    for at in range(streams):
        w, o = weights + at * w_stride, out + at * 4
        if m == 1:
            _one(x, x_stride, w, w_step, k, o, out_stride, 0, o_step)
        elif m == 2:
            _two(x, x_stride, w, w_step, k, o, out_stride, 0, o_step)
        elif m == 3:
            _three(x, x_stride, w, w_step, k, o, out_stride, 0, o_step)
        elif m == 4:
            _four(x, x_stride, w, w_step, k, o, out_stride, 0, o_step)
        elif m == 5:
            _five(x, x_stride, w, w_step, k, o, out_stride, 0, o_step)
        else:
            _six(x, x_stride, w, w_step, k, o, out_stride, 0, o_step)
    _rest(x, x_stride, m, weights, w_stride, streams * columns, n, k, out, out_stride)


def _many_sums(x, x_stride, m, weights, w_stride, n, k, out, out_stride, wide):
    """Multiplies more rows than a tile has, in several passes over each weight tile. The passes prefetch the next
    weight tile between them, which keeps memory evenly busy. `wide`: memory for the widened weights of a tile."""
    last = n - n % COLUMNS
    passes = (m + ROWS - 1) // ROWS
    step = max(1, w_stride // (passes * max(1, k // LANES)))
    pass_bytes = step * (k // LANES) * COLUMNS
    for column in range(0, last, COLUMNS):
        w, w_step = weights + column * w_stride, w_stride
        x_at, o, ahead, left = x, out + column * 4, w + COLUMNS * w_stride, m
        if _item != FLOAT32:
            _widen_rows(w, w_stride, COLUMNS, k, wide, 4 * k)
            w, w_step = wide, 4 * k
        for number in range(passes, 0, -1):
            rows = (left + number - 1) // number  # nearly equal in all passes, and never less than half a tile
            if rows == 2:
                _two(x_at, x_stride, w, w_step, k, o, out_stride, ahead, step)
            elif rows == 3:
                _three(x_at, x_stride, w, w_step, k, o, out_stride, ahead, step)
            elif rows == 4:
                _four(x_at, x_stride, w, w_step, k, o, out_stride, ahead, step)
            elif rows == 5:
                _five(x_at, x_stride, w, w_step, k, o, out_stride, ahead, step)
            else:
                _six(x_at, x_stride, w, w_step, k, o, out_stride, ahead, step)
            x_at, o, ahead, left = x_at + rows * x_stride, o + rows * out_stride, ahead + pass_bytes, left - rows
    _rest(x, x_stride, m, weights, w_stride, last, n, k, out, out_stride)


def _rest_sums(x, x_stride, m, weights, w_stride, first, n, k, out, out_stride):
    """Multiplies with the weight rows that do not fill a tile."""
    for column in range(first, n):
        for row in range(m):
            x_at, o = x + row * x_stride, out + row * out_stride + column * 4
            _thin(x_at, x_stride, weights + column * w_stride, w_stride, k, o, out_stride, 0, 0)


def _sums(x, x_stride, m, matrix, w_stride, first, n, k, out, out_stride, wide):
    """Multiplies rows with n weight rows from number `first` on. Returns the address of the first sum."""
    weights = matrix + first * w_stride
    if m <= len(_FLOAT_COLUMNS):
        _few(x, x_stride, m, weights, w_stride, n, k, out, out_stride)
    else:
        _many(x, x_stride, m, weights, w_stride, n, k, out, out_stride, wide)
    return out


def _packed_tile(rows, x, x_stride, weights, blocks, out, out_stride):
    if rows == 1:
        _one(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)
    elif rows == 2:
        _two(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)
    elif rows == 3:
        _three(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)
    elif rows == 4:
        _four(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)
    elif rows == 5:
        _five(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)
    elif rows == 6:
        _six(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)
    elif rows == 7:
        _seven(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)
    else:
        _eight(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0)


def _packed_sums(x, x_stride, m, matrix, w_stride, first, n, k, out, out_stride, wide):
    """Does for packed weights what `_sums` does. Groups of weight rows are computed whole: `out` has room for the
    unused rows of the first and the last group."""
    blocks, before = k // BLOCK, first % INTERLEAVED
    weights = matrix + (first - before) * w_stride
    groups = (before + n + INTERLEAVED - 1) // INTERLEAVED
    passes = (m + PACKED_ROWS - 1) // PACKED_ROWS
    for group in range(groups):
        x_at, o, left = x, out + group * LINE_BYTES, m
        for number in range(passes, 0, -1):
            rows = (left + number - 1) // number  # nearly equal in all passes
            _tile(rows, x_at, x_stride, weights, blocks, o, out_stride)
            x_at, o, left = x_at + rows * x_stride, o + rows * out_stride, left - rows
        weights += INTERLEAVED * w_stride
    return out + 4 * before


def _widen(weights, w_stride, n, k, out, out_stride):
    """Converts 16-bit rows to float32 rows."""
    for row in range(n):
        w, o = weights + row * w_stride, out + row * out_stride
        whole = k - k % LANES
        for at in range(0, whole, LANES):
            store(o + 4 * at, _load_whole(w + 2 * at))
        if whole < k:
            store_part(o + 4 * whole, _load_narrow(w + 2 * whole, k - whole), k - whole)


@njit(**OPTIONS)
def _finish(job, first_row, rows, first_column, columns, sums, ups, stride):
    """Writes the output from sums: bias, activation, residual."""
    activation, bias, residual = word(job, ACTIVATION), word(job, BIAS), word(job, RESIDUAL)
    bias_gap = word(job, N) * 4
    for row in range(rows):
        s, u = sums + row * stride, ups + row * stride
        o = word(job, OUT) + (first_row + row) * word(job, OUT_STRIDE) + first_column * 4
        r = residual + (first_row + row) * word(job, RESIDUAL_STRIDE) + first_column * 4
        b = bias + first_column * 4
        for at in range(0, columns, LANES):
            count = min(LANES, columns - at)
            y = load_part(s + 4 * at, count)
            if bias != 0:
                y = add(y, load_part(b + 4 * at, count))
            if activation != NONE:
                up = load_part(u + 4 * at, count)
                if bias != 0:
                    up = add(up, load_part(b + bias_gap + 4 * at, count))
                y = gate(activation, y, up)
            if residual != 0:
                y = add(load_part(r + 4 * at, count), y)
            store_part(o + 4 * at, y, count)


def linear(job, chunk, sums):
    """Computes one strip of the output. `sums` is the thread's scratch memory."""
    m, k, n = word(job, M), word(job, K), word(job, N)
    first = chunk * word(job, WIDTH)
    columns = min(word(job, WIDTH), n - first)
    gated = word(job, ACTIVATION) != NONE
    # Groups of packed weight rows are computed whole.
    stride = 4 * (INTERLEAVED + (columns + INTERLEAVED - 1) // INTERLEAVED * INTERLEAVED)
    x_stride, w_stride, matrix = word(job, X_STRIDE), word(job, W_STRIDE), word(job, WEIGHTS)
    block = _rows_per_block(m, k)
    wide = sums + _SUMS_BYTES
    for row in range(0, m, block):
        rows = min(block, m - row)
        x = word(job, X) + row * x_stride
        plain = ups = _sums_of(x, x_stride, rows, matrix, w_stride, first, columns, k, sums, stride, wide)
        if gated:
            below = sums + rows * stride
            ups = _sums_of(x, x_stride, rows, matrix, w_stride, n + first, columns, k, below, stride, wide)
        _finish(job, row, rows, first, columns, plain, ups, stride)


def _packed_kernel(item: int) -> Kernel:
    tiles = {
        name: coarse_tile(rows) if item == COARSE else packed_tile(rows, item) for rows, name in enumerate(_TILES, 1)
    }
    return Kernel(linear, item, _sums_of=part(_packed_sums, item, _tile=part(_packed_tile, item, **tiles)))


def _kernel(item: int) -> Kernel:
    rest = part(_rest_sums, item, _thin=dot_tile(1, 1, item))
    # Tiles with more rows than fit into registers are never called; the largest tile fills their names.
    single = {
        name: dot_tile(rows, _FLOAT_COLUMNS[rows - 1], item, spread=True)
        for name, rows in ((name, min(rows, ROWS)) for rows, name in enumerate(_TILES, 1))
    }
    few = part(_few_sums, item, _rest=rest, **single)
    widen = part(_widen, item, _load_whole=loader(item), _load_narrow=part_loader(item))
    passes = {
        name: dot_tile(min(max(rows, ROWS // 2), ROWS), COLUMNS, ahead=True) for rows, name in enumerate(_TILES, 1)
    }
    many = part(_many_sums, item, _item=item, _rest=rest, _widen_rows=widen, **passes)
    return Kernel(linear, item, _sums_of=part(_sums, item, _few=few, _many=many))


LINEAR = {item: _kernel(item) for item in (FLOAT32, BFLOAT16, FLOAT16)}
LINEAR |= {item: _packed_kernel(item) for item in (*PACKED, COARSE)}


@njit(**OPTIONS)
def plan_linear(job, threads):
    """Plans several strips for each thread, so that other threads take over from one that is descheduled."""
    m, n, k = word(job, M), word(job, N), word(job, K)
    both = 2 if word(job, ACTIVATION) != NONE else 1
    width = (n + 8 * threads - 1) // (8 * threads) + _WIDTH_STEP // 2
    width = min(width, _WIDTH_MAX, _SUMS_BYTES // (4 * both * _rows_per_block(m, k)) - INTERLEAVED)
    width = max(1, width // _WIDTH_STEP) * _WIDTH_STEP
    set_word(job, WIDTH, width)
    set_word(job, CHUNKS, (n + width - 1) // width)
