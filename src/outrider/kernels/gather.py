"""Rows of a matrix by number, in float32: embeddings."""

from __future__ import annotations

import numpy as np

from outrider.kernels.compiling import UNBOUND, Kernel, part
from outrider.kernels.jobs import OWN, word
from outrider.kernels.memory import load_f32, load_i32, load_i64, store_f32
from outrider.kernels.narrow import BLOCK
from outrider.kernels.packed import LINE_BYTES, LINES, PACKED, WOVEN
from outrider.kernels.vector import (
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
"""STRIDE in bytes, of woven rows their mean; rows of OUT lie one after the other. SCALE holds a float32, by which all
is multiplied."""
ROWS_PER_CHUNK = 16

# Bound anew for each way of storing numbers.
_bytes = 0
_load_narrow = _widen = UNBOUND


def _unpack_four(matrix, number, stride, k, out):
    """A row out of its group of woven ones."""
    line = matrix + number // WOVEN * (WOVEN * stride) + 4 * (number % WOVEN)
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
    line = matrix + number // WOVEN * (WOVEN * stride) + 4 * (number % WOVEN)
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
