"""Queries and keys: normed, rotated, put in place. Keys and values go to their slots."""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.kernels.compiling import OPTIONS, UNBOUND, Kernel, part
from outrider.kernels.jobs import CHUNKS, OWN, set_word, word
from outrider.kernels.memory import load_f32, load_i64
from outrider.kernels.norm import norm_row
from outrider.kernels.vector import (
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
"""The layer's. SCALE, NORM_EPS and SOFTCAP hold float32; 0 is no softcap, and no norm or sinks at address 0."""
(STEP, QKV, QKV_STRIDE, QUERIES, OUT, OUT_STRIDE) = range(OWN + 11, OWN + 17)
"""STEP: address of what changes from step to step. QUERIES: scratch for all rows' queries, rotated and scaled."""
(ROTATE_KERNEL, ATTEND_KERNEL, KEYS, VALUES, PAGE_TOKENS) = range(OWN + 17, OWN + 22)
"""The kernels run one after the other on one job."""
(KEY_PAGE, KEY_HEAD, KEY_TOKEN, VALUE_PAGE, VALUE_HEAD, VALUE_TOKEN) = range(OWN + 22, OWN + 28)
"""Strides in bytes."""
NEXT = OWN + 28
(ROWS, POSITIONS, SLOTS, SEQUENCE, TABLES, TABLE_STRIDE, FIRST_KEY, STOP_KEY) = range(8)
"""Words of the step: shared by all layers of a group, so that a job can be written once and run in every step."""
ROWS_PER_CHUNK = 4

# Bound anew for each way of storing keys and values.
_item_bytes = 4
_store_narrow = _put_item = _rotate_one = UNBOUND


@njit(inline="always")
def step_word(job, number):
    return load_i64(load_i64(job + 8 * STEP) + 8 * number)


def _put(source, count, target):
    """Float32 numbers to stored ones."""
    for at in range(0, count, LANES):
        _store_narrow(target + _item_bytes * at, load_part(source + 4 * at, count - at), count - at)


@njit(**OPTIONS)
def _rotate_head(source, dim, table, rotary_dim, scale, out):
    """Both halves of the leading elements against each other; the rest only scaled. In place is fine."""
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
    table = word(job, ROTARY) + load_i64(step_word(job, POSITIONS) + 8 * row) * rotary_dim * 4
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
    slot = load_i64(step_word(job, SLOTS) + 8 * row)
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
    for row in range(first, min(first + ROWS_PER_CHUNK, step_word(job, ROWS))):
        _rotate_one(job, row, scratch)


def _kernel(item: int) -> Kernel:
    put = part(_put, item, _store_narrow=part_storer(item), _item_bytes=ITEM_BYTES[item])
    return Kernel(rotate, item, _rotate_one=part(_rotate_row, item, _put_item=put))


ROTATE = {item: _kernel(item) for item in (FLOAT32, BFLOAT16, FLOAT16)}


@njit(**OPTIONS)
def plan_rotate(job):
    set_word(job, CHUNKS, (step_word(job, ROWS) + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
