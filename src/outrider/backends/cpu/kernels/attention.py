"""Attention of rows over pages of keys and values.

Keys are taken in blocks of BLOCK positions that begin at multiples of BLOCK. A block's result (its largest score, its
sum of weights, its weighted values) depends only on the row and the block, and blocks are merged in order. A row's
result is therefore the same for any batch, any number of threads and any page size.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.backends.cpu.kernels.compiling import OPTIONS, UNBOUND, Kernel, part
from outrider.backends.cpu.kernels.jobs import CHUNKS, set_word, word
from outrider.backends.cpu.kernels.memory import load_f32, load_i32, load_i64, prefetch, store_f32, store_i64
from outrider.backends.cpu.kernels.rotate import (
    BLOCK_TABLES,
    DIM,
    FIRST_KEY,
    HEADS,
    KEY_HEAD,
    KEY_PAGE,
    KEY_TOKEN,
    KEYS,
    KV_HEADS,
    NEXT,
    OUT,
    OUT_STRIDE,
    PAGE_TOKENS,
    QUERIES,
    ROWS,
    SINKS,
    SOFTCAP,
    STOP_KEY,
    TABLE_ROWS,
    TABLE_STRIDE,
    VALUE_HEAD,
    VALUE_PAGE,
    VALUE_TOKEN,
    VALUES,
    metadata_word,
)
from outrider.backends.cpu.kernels.softmax import exponential, weights_of_scores
from outrider.backends.cpu.kernels.tiles import dot_tile, mix_tile
from outrider.backends.cpu.kernels.vector import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ITEM_BYTES,
    LANE_BYTES,
    LANES,
    div,
    fma,
    load,
    mul,
    splat,
    store,
    store_part,
)

(PLAN, PARTS, BLOCKS, MODE) = range(NEXT, NEXT + 4)
"""PLAN: the address of the list of tiles, each a first row and a number of rows. PARTS: the address of the results of
blocks, where several threads work on the blocks of one row. MODE: one of the next three."""
_TILE, _PART, _MERGE = range(3)

BLOCK = 256
TILE_ROWS = 16
_HEADS = 4
_KEYS = 4 if LANES == 16 else 3
_KEYS_AHEAD = 4 * _KEYS
_VECTORS = 4 if LANES == 16 else 2
_NOTHING = np.float32(-np.inf)

# Bound by `part` and `Kernel` for each element type of keys and values.
_item_bytes, _vector_bytes = 4, LANE_BYTES
_one = _two = _three = _four = _thin = UNBOUND
_scores_of_item = _mixture_of_item = _block_result = _tile = _part = UNBOUND


def part_bytes(dim: int) -> int:
    """Returns the bytes of a result for one head: its largest score and sum of weights, then its weighted values."""
    return LANE_BYTES + (dim + LANES - 1) // LANES * LANE_BYTES


def scratch_bytes(heads: int, kv_heads: int, dim: int) -> int:
    """Returns the scratch bytes of a thread: two lists of addresses, a block's scores, its result, and the running
    results of a tile."""
    heads_per_kv = heads // kv_heads
    return 16 * BLOCK + heads_per_kv * (4 * BLOCK + (TILE_ROWS + 1) * part_bytes(dim))


@njit(**OPTIONS)
def _fetch(keys, values, count, at, row_bytes):
    """Prefetches the values that belong to a group of keys, and a later group of keys."""
    for number in range(at, min(at + _KEYS, count)):
        value = load_i64(values + 8 * number)
        for line in range(0, row_bytes, 64):
            prefetch(value + line)
        if number + _KEYS_AHEAD < count:
            key = load_i64(keys + 8 * (number + _KEYS_AHEAD))
            for line in range(0, row_bytes, 64):
                prefetch(key + line)


def _scores(queries, heads_per_kv, dim, keys, values, count, fresh, out):
    """Computes every head's scores with the listed keys. `fresh`: keys and values are not in the processor's cache."""
    last = count - count % _KEYS
    q_stride, s_stride = 4 * dim, 4 * BLOCK
    for head in range(0, heads_per_kv, _HEADS):
        heads = min(_HEADS, heads_per_kv - head)
        q, o = queries + head * q_stride, out + head * s_stride
        for t in range(0, last, _KEYS):
            if fresh and head == 0:
                _fetch(keys, values, count, t, dim * _item_bytes)
            if heads == 1:
                _one(q, q_stride, keys + 8 * t, 0, dim, o + 4 * t, s_stride, 0, 0)
            elif heads == 2:
                _two(q, q_stride, keys + 8 * t, 0, dim, o + 4 * t, s_stride, 0, 0)
            elif heads == 3:
                _three(q, q_stride, keys + 8 * t, 0, dim, o + 4 * t, s_stride, 0, 0)
            else:
                _four(q, q_stride, keys + 8 * t, 0, dim, o + 4 * t, s_stride, 0, 0)
        for t in range(last, count):
            for each in range(heads):
                _thin(q + each * q_stride, q_stride, keys + 8 * t, 0, dim, o + each * s_stride + 4 * t, 0, 0, 0)


def _mixture(weights, heads_per_kv, dim, values, count, out, out_stride):
    """Computes every head's weighted sum of the listed values."""
    w_stride = 4 * BLOCK
    vectors = dim // LANES
    wide = vectors - vectors % _VECTORS
    for head in range(0, heads_per_kv, _HEADS):
        heads = min(_HEADS, heads_per_kv - head)
        w, o = weights + head * w_stride, out + head * out_stride
        for number in range(0, wide, _VECTORS):
            offset, target = number * _vector_bytes, o + number * LANE_BYTES
            if heads == 1:
                _one(w, w_stride, values, offset, count, target, out_stride, 0, 0)
            elif heads == 2:
                _two(w, w_stride, values, offset, count, target, out_stride, 0, 0)
            elif heads == 3:
                _three(w, w_stride, values, offset, count, target, out_stride, 0, 0)
            else:
                _four(w, w_stride, values, offset, count, target, out_stride, 0, 0)
        for each in range(heads):
            # The remaining elements: single vectors, the last of which may be partial.
            for number in range(wide, (dim + LANES - 1) // LANES):
                target, lanes = o + each * out_stride + number * LANE_BYTES, dim - number * LANES
                _thin(w + each * w_stride, 0, values, number * _vector_bytes, count, target, 0, lanes, 0)


@njit(**OPTIONS)
def _list_addresses(job, table_row, kv_head, first, stop, keys, values):
    """Lists the addresses of the keys and values at positions [first, stop), so that tiles need not know pages."""
    page_tokens = word(job, PAGE_TOKENS)
    table = metadata_word(job, BLOCK_TABLES) + table_row * metadata_word(job, TABLE_STRIDE)
    key_base = word(job, KEYS) + kv_head * word(job, KEY_HEAD)
    value_base = word(job, VALUES) + kv_head * word(job, VALUE_HEAD)
    key_step, value_step = word(job, KEY_TOKEN), word(job, VALUE_TOKEN)
    at = first
    while at < stop:
        number = at // page_tokens
        offset = at - number * page_tokens
        end = min(stop, at + page_tokens - offset)
        page = np.int64(load_i32(table + 4 * number))
        key = key_base + page * word(job, KEY_PAGE) + offset * key_step
        value = value_base + page * word(job, VALUE_PAGE) + offset * value_step
        for position in range(at, end):
            store_i64(keys + 8 * (position - first), key)
            store_i64(values + 8 * (position - first), value)
            key += key_step
            value += value_step
        at = end


def _attend_block(job, row, kv_head, keys, values, count, fresh, scores, part):
    """Computes the result of a block for each head of the row that reads this KV head."""
    heads, dim = word(job, HEADS), word(job, DIM)
    heads_per_kv = heads // word(job, KV_HEADS)
    stride = LANE_BYTES + (dim + LANES - 1) // LANES * LANE_BYTES
    queries = word(job, QUERIES) + (row * heads + kv_head * heads_per_kv) * dim * 4
    _scores_of_item(queries, heads_per_kv, dim, keys, values, count, fresh, scores)
    softcap = load_f32(job + 8 * SOFTCAP)
    for head in range(heads_per_kv):
        weights_of_scores(scores + head * BLOCK * 4, count, softcap, part + head * stride)
    _mixture_of_item(scores, heads_per_kv, dim, values, count, part + LANE_BYTES, stride)


@njit(**OPTIONS)
def _merge(running, part, heads_per_kv, stride):
    """Merges the result of a block into the running result."""
    for head in range(heads_per_kv):
        r, p = running + head * stride, part + head * stride
        before, here = load_f32(r), load_f32(p)
        most = max(before, here)
        old, new = exponential(before - most), exponential(here - most)
        store_f32(r, most)
        store_f32(r + 4, load_f32(r + 4) * old + load_f32(p + 4) * new)
        for at in range(LANE_BYTES, stride, LANE_BYTES):
            store(r + at, fma(load(r + at), splat(old), mul(load(p + at), splat(new))))


@njit(**OPTIONS)
def _begin(running, heads_per_kv, stride):
    for head in range(heads_per_kv):
        for at in range(0, stride, LANE_BYTES):
            store(running + head * stride + at, splat(np.float32(0.0)))
        store_f32(running + head * stride, _NOTHING)


@njit(**OPTIONS)
def _end(job, row, kv_head, running, heads_per_kv, stride):
    """Adds the attention sink and divides by the sum of weights. A row without keys gives zeros."""
    dim, sinks = word(job, DIM), word(job, SINKS)
    for head in range(heads_per_kv):
        r, number = running + head * stride, kv_head * heads_per_kv + head
        sum_of_weights, factor = load_f32(r + 4), np.float32(1.0)
        if sinks != 0:
            sink, here = load_f32(sinks + 4 * number), load_f32(r)
            most = max(sink, here)
            factor = exponential(here - most)
            sum_of_weights = sum_of_weights * factor + exponential(sink - most)
        out = word(job, OUT) + row * word(job, OUT_STRIDE) + number * dim * 4
        below = sum_of_weights if sum_of_weights != np.float32(0.0) else np.float32(1.0)
        for at in range(0, dim, LANES):
            value = mul(load(r + LANE_BYTES + 4 * at), splat(factor))
            store_part(out + 4 * at, div(value, splat(below)), dim - at)


@njit(**OPTIONS)
def _range_of(job, row):
    first = load_i64(metadata_word(job, FIRST_KEY) + 8 * row)
    stop = load_i64(metadata_word(job, STOP_KEY) + 8 * row)
    return first, max(first, stop)


def _attend_tile(job, chunk, scratch):
    """Computes one tile of rows for one KV head. A block is used for all rows while it is in the processor's cache."""
    kv_heads, dim = word(job, KV_HEADS), word(job, DIM)
    heads_per_kv = word(job, HEADS) // kv_heads
    stride = LANE_BYTES + (dim + LANES - 1) // LANES * LANE_BYTES
    tile, kv_head = chunk // kv_heads, chunk % kv_heads
    first_row, rows = load_i64(word(job, PLAN) + 16 * tile), load_i64(word(job, PLAN) + 16 * tile + 8)
    keys, values = scratch, scratch + 8 * BLOCK
    scores = values + 8 * BLOCK
    part = scores + heads_per_kv * 4 * BLOCK
    running = part + heads_per_kv * stride
    table_row = load_i64(metadata_word(job, TABLE_ROWS) + 8 * first_row)
    low, high = _range_of(job, first_row)
    for number in range(rows):
        _begin(running + number * heads_per_kv * stride, heads_per_kv, stride)
        first, stop = _range_of(job, first_row + number)
        low, high = min(low, first), max(high, stop)
    for begin in range(low // BLOCK * BLOCK, high, BLOCK):
        base = max(begin, low)
        _list_addresses(job, table_row, kv_head, base, min(begin + BLOCK, high), keys, values)
        fresh = True
        for number in range(rows):
            first, stop = _range_of(job, first_row + number)
            first, stop = max(first, begin), min(stop, begin + BLOCK)
            if first < stop:
                at = 8 * (first - base)
                _block_result(
                    job, first_row + number, kv_head, keys + at, values + at, stop - first, fresh, scores, part
                )
                fresh = False
                _merge(running + number * heads_per_kv * stride, part, heads_per_kv, stride)
    for number in range(rows):
        _end(job, first_row + number, kv_head, running + number * heads_per_kv * stride, heads_per_kv, stride)


def _attend_part(job, chunk, scratch):
    """Computes one block of one row for one KV head, to be merged by `_merge_row`."""
    kv_heads, dim, blocks = word(job, KV_HEADS), word(job, DIM), word(job, BLOCKS)
    heads_per_kv = word(job, HEADS) // kv_heads
    stride = LANE_BYTES + (dim + LANES - 1) // LANES * LANE_BYTES
    row, kv_head, block = chunk // (kv_heads * blocks), chunk // blocks % kv_heads, chunk % blocks
    keys, values = scratch, scratch + 8 * BLOCK
    scores = values + 8 * BLOCK
    first, stop = _range_of(job, row)
    begin = (first // BLOCK + block) * BLOCK
    first, stop = max(first, begin), min(stop, begin + BLOCK)
    if first < stop:
        table_row = load_i64(metadata_word(job, TABLE_ROWS) + 8 * row)
        _list_addresses(job, table_row, kv_head, first, stop, keys, values)
        part = word(job, PARTS) + chunk * heads_per_kv * stride
        _block_result(job, row, kv_head, keys, values, stop - first, True, scores, part)


@njit(**OPTIONS)
def _merge_row(job, row, scratch):
    kv_heads, dim, blocks = word(job, KV_HEADS), word(job, DIM), word(job, BLOCKS)
    heads_per_kv = word(job, HEADS) // kv_heads
    stride = LANE_BYTES + (dim + LANES - 1) // LANES * LANE_BYTES
    first, stop = _range_of(job, row)
    for kv_head in range(kv_heads):
        _begin(scratch, heads_per_kv, stride)
        if first < stop:
            for block in range((stop - 1) // BLOCK - first // BLOCK + 1):
                part = word(job, PARTS) + ((row * kv_heads + kv_head) * blocks + block) * heads_per_kv * stride
                _merge(scratch, part, heads_per_kv, stride)
        _end(job, row, kv_head, scratch, heads_per_kv, stride)


def attend(job, chunk, scratch):
    mode = word(job, MODE)
    if mode == _TILE:
        _tile(job, chunk, scratch)
    elif mode == _PART:
        _part(job, chunk, scratch)
    else:
        _merge_row(job, chunk, scratch)


def _kernel(item: int) -> Kernel:
    names = ("_one", "_two", "_three", "_four")
    dots = {name: dot_tile(heads, _KEYS, item, listed=True) for heads, name in enumerate(names, 1)}
    mixes = {name: mix_tile(heads, _VECTORS, item) for heads, name in enumerate(names, 1)}
    scores = part(_scores, item, _thin=dot_tile(1, 1, item, listed=True), _item_bytes=ITEM_BYTES[item], **dots)
    thin_mix = mix_tile(1, 1, item, partial=True)
    mixture = part(_mixture, item, _thin=thin_mix, _vector_bytes=LANES * ITEM_BYTES[item], **mixes)
    block = part(_attend_block, item, _scores_of_item=scores, _mixture_of_item=mixture)
    tile, one_part = part(_attend_tile, item, _block_result=block), part(_attend_part, item, _block_result=block)
    return Kernel(attend, item, _tile=tile, _part=one_part)


ATTEND = {item: _kernel(item) for item in (FLOAT32, BFLOAT16, FLOAT16)}


@njit(**OPTIONS)
def _blocks_of_rows(job):
    """Returns the largest number of blocks that any row reads."""
    most = 1
    for row in range(metadata_word(job, ROWS)):
        first, stop = _range_of(job, row)
        if first < stop:
            most = max(most, (stop - 1) // BLOCK - first // BLOCK + 1)
    return most


@njit(**OPTIONS)
def plan_attend(job, threads, parts_max):
    """Makes each tile a chunk where there are enough tiles for all threads, else each block, if there is room to keep
    the results of blocks."""
    rows, kv_heads = metadata_word(job, ROWS), word(job, KV_HEADS)
    blocks = _blocks_of_rows(job)
    chunks = rows * kv_heads * blocks
    if blocks > 1 and threads > 1 and rows * kv_heads < 8 * threads and chunks <= parts_max:
        set_word(job, BLOCKS, blocks)
        set_word(job, MODE, _PART)
        set_word(job, CHUNKS, chunks)
        return
    rows_max = max(1, min(TILE_ROWS, rows * kv_heads // (4 * threads)))
    plan, tiles = word(job, PLAN), 0
    row = 0
    while row < rows:
        table_row = load_i64(metadata_word(job, TABLE_ROWS) + 8 * row)
        low, high = _range_of(job, row)
        count = 1
        while row + count < rows and count < rows_max:
            if load_i64(metadata_word(job, TABLE_ROWS) + 8 * (row + count)) != table_row:
                break
            first, stop = _range_of(job, row + count)
            if first > high or stop < low:  # pages between the two ranges may have been freed
                break
            low, high = min(low, first), max(high, stop)
            count += 1
        store_i64(plan + 16 * tiles, row)
        store_i64(plan + 16 * tiles + 8, count)
        tiles += 1
        row += count
    set_word(job, MODE, _TILE)
    set_word(job, CHUNKS, tiles * kv_heads)


@njit(**OPTIONS)
def plan_merge(job):
    """Plans the merging of blocks' results. Returns whether there are any to merge."""
    if word(job, MODE) != _PART:
        return False
    set_word(job, MODE, _MERGE)
    set_word(job, CHUNKS, metadata_word(job, ROWS))
    return True
