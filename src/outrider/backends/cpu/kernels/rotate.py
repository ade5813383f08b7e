"""Norms and rotates queries and keys, and writes keys and values to their slots."""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.backends.cpu.kernels.compiling import OPTIONS, UNBOUND, Kernel, part
from outrider.backends.cpu.kernels.jobs import CHUNKS, OWN, set_word, word
from outrider.backends.cpu.kernels.memory import load_f32, load_i64
from outrider.backends.cpu.kernels.norm import norm_row
from outrider.backends.cpu.kernels.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ITEM_BYTES,
    LANES,
    fma,
    load_part,
    mul,
    part_storer,
    splat,
    store_part,
    sub,
)

(
    HEADS,
    KV_HEADS,
    DIM,
    SCALE,
    ROTARY,
    ROTARY_DIM,
    Q_NORM,
    K_NORM,
    NORM_EPS,
    SOFTCAP,
    SINKS,
) = range(OWN, OWN + 11)
"""Words that describe the layer. SCALE, NORM_EPS and SOFTCAP hold float32. A softcap of 0, or an address of 0 for a
norm or the sinks, means that there is none."""
(METADATA, QKV, QKV_STRIDE, QUERIES, OUT, OUT_STRIDE) = range(OWN + 11, OWN + 17)
"""METADATA: the address of the words that describe the rows of a batch. QUERIES: scratch memory for the rotated and
scaled queries of all rows."""
(ROTATE_KERNEL, ATTEND_KERNEL, KEYS, VALUES, PAGE_TOKENS) = range(OWN + 17, OWN + 22)
"""The two kernels run one after the other on the same job."""
(KEY_PAGE, KEY_HEAD, KEY_TOKEN, VALUE_PAGE, VALUE_HEAD, VALUE_TOKEN) = range(OWN + 22, OWN + 28)
"""Strides of pages, heads and tokens, in bytes."""
NEXT = OWN + 28
(ROWS, POSITIONS, SLOT_MAPPING, TABLE_ROWS, BLOCK_TABLES, TABLE_STRIDE, FIRST_KEY, STOP_KEY) = range(8)
"""Words of the metadata. All layers of a KV group share them, so that a job is written once and runs in every step."""
ROWS_PER_CHUNK = 4

# Bound by `part` and `Kernel` for each element type of keys and values.
_item_bytes = 4
_store_narrow = _put_item = _rotate_one = UNBOUND


@njit(inline="always")
def metadata_word(job, number):
    return load_i64(load_i64(job + 8 * METADATA) + 8 * number)


def _put(source, count, target):
    """Writes float32 numbers in the element type of the cache."""
    for at in range(0, count, LANES):
        _store_narrow(target + _item_bytes * at, load_part(source + 4 * at, count - at), count - at)


@njit(**OPTIONS)
def _rotate_head(source, dim, table, rotary_dim, scale, out):
    """Rotates the two halves of a head's leading elements against each other, and scales all elements. `out` may be
    `source`."""
    half = rotary_dim // 2
    factor = splat(scale)
    for at in range(0, half, LANES):
        count = half - at
        first, second = load_part(source + 4 * at, count), load_part(source + 4 * (half + at), count)
        cosines, sines = load_part(table + 4 * at, count), load_part(table + 4 * (half + at), count)
        store_part(out + 4 * at, mul(sub(mul(first, cosines), mul(second, sines)), factor), count)
        store_part(out + 4 * (half + at), mul(fma(first, sines, mul(second, cosines)), factor), count)
    for at in range(rotary_dim, dim, LANES):
        store_part(out + 4 * at, mul(load_part(source + 4 * at, dim - at), factor), dim - at)


def _rotate_row(job, row, scratch):
    heads, kv_heads, dim = word(job, HEADS), word(job, KV_HEADS), word(job, DIM)
    rotary_dim, page_tokens = word(job, ROTARY_DIM), word(job, PAGE_TOKENS)
    q_norm, k_norm, eps = word(job, Q_NORM), word(job, K_NORM), load_f32(job + 8 * NORM_EPS)
    scale, one = load_f32(job + 8 * SCALE), np.float32(1.0)
    table = word(job, ROTARY) + load_i64(metadata_word(job, POSITIONS) + 8 * row) * rotary_dim * 4
    source = word(job, QKV) + row * word(job, QKV_STRIDE)
    out = word(job, QUERIES) + row * heads * dim * 4
    for _ in range(heads):
        if q_norm != 0:
            norm_row(source, dim, q_norm, eps, out, 0)
            _rotate_head(out, dim, table, rotary_dim, scale, out)
        else:
            _rotate_head(source, dim, table, rotary_dim, scale, out)
        source += dim * 4
        out += dim * 4
    slot = load_i64(metadata_word(job, SLOT_MAPPING) + 8 * row)
    page, offset = slot // page_tokens, slot % page_tokens
    target = word(job, KEYS) + page * word(job, KEY_PAGE) + offset * word(job, KEY_TOKEN)
    for head in range(kv_heads):
        if k_norm != 0:
            norm_row(source, dim, k_norm, eps, scratch, 0)
            _rotate_head(scratch, dim, table, rotary_dim, one, scratch)
        else:
            _rotate_head(source, dim, table, rotary_dim, one, scratch)
        _put_item(scratch, dim, target + head * word(job, KEY_HEAD))
        source += dim * 4
    target = word(job, VALUES) + page * word(job, VALUE_PAGE) + offset * word(job, VALUE_TOKEN)
    for head in range(kv_heads):
        _put_item(source, dim, target + head * word(job, VALUE_HEAD))
        source += dim * 4


def rotate(job, chunk, scratch):
    first = chunk * ROWS_PER_CHUNK
    for row in range(first, min(first + ROWS_PER_CHUNK, metadata_word(job, ROWS))):
        _rotate_one(job, row, scratch)


def _kernel(item: int) -> Kernel:
    put = part(_put, item, _store_narrow=part_storer(item), _item_bytes=ITEM_BYTES[item])
    return Kernel(rotate, item, _rotate_one=part(_rotate_row, item, _put_item=put))


ROTATE = {item: _kernel(item) for item in (FLOAT32, BFLOAT16, FLOAT16)}


@njit(**OPTIONS)
def plan_rotate(job):
    set_word(job, CHUNKS, (metadata_word(job, ROWS) + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
