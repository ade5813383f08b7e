"""Embedding lookup: rows of a matrix by number, converted to float32."""

from __future__ import annotations

import numpy as np

from outrider.backends.cpu.kernels.compiling import UNBOUND, Kernel, part
from outrider.backends.cpu.kernels.jobs import OWN, word
from outrider.backends.cpu.kernels.memory import load_f32, load_i32, load_i64, store_f32
from outrider.backends.cpu.kernels.narrow import BLOCK
from outrider.backends.cpu.kernels.packed import INTERLEAVED, LINE_BYTES, LINES, PACKED
from outrider.backends.cpu.kernels.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FOUR_BITS,
    ITEM_BYTES,
    LANES,
    load_part,
    mul,
    part_loader,
    splat,
    store_part,
)

NUMBERS, M, MATRIX, STRIDE, K, OUT, SCALE = range(OWN, OWN + 7)
"""Words of the job. STRIDE is the number of bytes per row, for interleaved rows on average. Rows of OUT are contiguous.
SCALE holds a float32 by which all elements are multiplied."""
ROWS_PER_CHUNK = 16

# Bound by `part` and `Kernel` for each element type.
_bytes = 0
_load_narrow = _widen = UNBOUND


def _unpack_four(matrix, number, stride, k, out):
    """Writes one row of 4-bit integers, out of its interleaved group, as float32."""
    line = matrix + number // INTERLEAVED * (INTERLEAVED * stride) + 4 * (number % INTERLEAVED)
    for block in range(k // BLOCK):
        scale, lowest = load_f32(line), load_f32(line + LINE_BYTES)
        for quad in range(4):
            four = load_i32(line + (2 + quad) * LINE_BYTES)
            at = out + 4 * (block * BLOCK + 4 * quad)
            for byte in range(4):
                both = (four >> (8 * byte)) & 255
                store_f32(at + 4 * byte, np.float32(both & 15) * scale + lowest)
                store_f32(at + 4 * byte + 64, np.float32(both >> 4) * scale + lowest)
        line += _bytes


def _unpack_eight(matrix, number, stride, k, out):
    """Writes one row of 8-bit integers, out of its interleaved group, as float32."""
    line = matrix + number // INTERLEAVED * (INTERLEAVED * stride) + 4 * (number % INTERLEAVED)
    for block in range(k // BLOCK):
        scale = load_f32(line)
        for quad in range(8):
            four = load_i32(line + (1 + quad) * LINE_BYTES)
            for byte in range(4):
                signed = (((four >> (8 * byte)) & 255) ^ 128) - 128
                store_f32(out + 4 * (block * BLOCK + 4 * quad + byte), np.float32(signed) * scale)
        line += _bytes


def _widen_row(matrix, number, stride, k, out):
    source = matrix + number * stride
    for at in range(0, k, LANES):
        store_part(out + 4 * at, _load_narrow(source + _bytes * at, k - at), k - at)


def gather(job, chunk, scratch):
    k, scale = word(job, K), load_f32(job + 8 * SCALE)
    first = chunk * ROWS_PER_CHUNK
    for row in range(first, min(first + ROWS_PER_CHUNK, word(job, M))):
        out = word(job, OUT) + row * k * 4
        _widen(word(job, MATRIX), load_i64(word(job, NUMBERS) + 8 * row), word(job, STRIDE), k, out)
        if scale != np.float32(1.0):
            for at in range(0, k, LANES):
                store_part(out + 4 * at, mul(load_part(out + 4 * at, k - at), splat(scale)), k - at)


def _kernel(item: int) -> Kernel:
    if item in PACKED:
        unpack = _unpack_four if item == FOUR_BITS else _unpack_eight
        widen = part(unpack, item, _bytes=LINES[item] * LINE_BYTES)
    else:
        widen = part(_widen_row, item, _load_narrow=part_loader(item), _bytes=ITEM_BYTES[item])
    return Kernel(gather, item, _widen=widen)


GATHER = {item: _kernel(item) for item in (FLOAT32, BFLOAT16, FLOAT16, *PACKED)}
