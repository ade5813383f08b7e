"""Rows of a packed matrix by number: embeddings."""

from __future__ import annotations

from outrider.kernels.compiling import UNBOUND, Kernel
from outrider.kernels.jobs import OWN, word
from outrider.kernels.memory import load_i64
from outrider.kernels.packed import BLOCK, BLOCK_BYTES, PACKED, block_unpacker

NUMBERS, M, MATRIX, STRIDE, K, OUT = range(OWN, OWN + 6)
"""STRIDE in bytes; rows of OUT lie one after the other."""
ROWS_PER_CHUNK = 16

# Bound anew for each packing.
_block_bytes = 0
_unpack = UNBOUND


def gather(job, chunk, scratch):
    k = word(job, K)
    first = chunk * ROWS_PER_CHUNK
    for row in range(first, min(first + ROWS_PER_CHUNK, word(job, M))):
        source = word(job, MATRIX) + load_i64(word(job, NUMBERS) + 8 * row) * word(job, STRIDE)
        out = word(job, OUT) + row * k * 4
        for block in range(k // BLOCK):
            _unpack(source + block * _block_bytes, out + block * (4 * BLOCK))


GATHER = {item: Kernel(gather, item, _unpack=block_unpacker(item), _block_bytes=BLOCK_BYTES[item]) for item in PACKED}
