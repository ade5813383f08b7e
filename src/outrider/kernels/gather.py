"""Rows of a matrix by number, in float32: embeddings."""

from __future__ import annotations

import numpy as np

from outrider.kernels.compiling import UNBOUND, Kernel, part
from outrider.kernels.jobs import OWN, word
from outrider.kernels.memory import load_f32, load_i64
from outrider.kernels.packed import BLOCK, BLOCK_BYTES, PACKED, block_unpacker
from outrider.kernels.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ITEM_BYTES,
    LANES,
    load_part,
    mul,
    part_loader,
    splat,
    store_part,
)

NUMBERS, M, MATRIX, STRIDE, K, OUT, SCALE = range(OWN, OWN + 7)
"""STRIDE in bytes; rows of OUT lie one after the other. SCALE holds a float32, by which all is multiplied."""
ROWS_PER_CHUNK = 16

# Bound anew for each way of storing numbers.
_bytes = 0
_unpack = _load_narrow = _widen = UNBOUND


def _unpack_row(source, k, out):
    for block in range(k // BLOCK):
        _unpack(source + block * _bytes, out + block * (4 * BLOCK))


def _widen_row(source, k, out):
    for at in range(0, k, LANES):
        store_part(out + 4 * at, _load_narrow(source + _bytes * at, k - at), k - at)


def gather(job, chunk, scratch):
    k, scale = word(job, K), load_f32(job + 8 * SCALE)
    first = chunk * ROWS_PER_CHUNK
    for row in range(first, min(first + ROWS_PER_CHUNK, word(job, M))):
        out = word(job, OUT) + row * k * 4
        _widen(word(job, MATRIX) + load_i64(word(job, NUMBERS) + 8 * row) * word(job, STRIDE), k, out)
        if scale != np.float32(1.0):
            for at in range(0, k, LANES):
                store_part(out + 4 * at, mul(load_part(out + 4 * at, k - at), splat(scale)), k - at)


def _kernel(item: int) -> Kernel:
    if item in PACKED:
        widen = part(_unpack_row, item, _unpack=block_unpacker(item), _bytes=BLOCK_BYTES[item])
    else:
        widen = part(_widen_row, item, _load_narrow=part_loader(item), _bytes=ITEM_BYTES[item])
    return Kernel(gather, item, _widen=widen)


GATHER = {item: _kernel(item) for item in (FLOAT32, BFLOAT16, FLOAT16, *PACKED)}
