"""Attention over pages for ragged batches: prompt chunks, decoded rows, verified drafts and blocks, in one kernel.

A tile is the rows of one request that share a program, and every query head that reads the same keys: packed row
m of the tile is query head m % GROUP of row m // GROUP. Each row has its own range of keys [first key, stop key),
which expresses windows, anchored windows, causal rows and blocks that attend both ways.

Keys are cut at absolute multiples of a segment:

    positions   0         SEGMENT     2 * SEGMENT   3 * SEGMENT
                |    0     |     1      |     2      |
    row reads        [==================)

Each segment has a maximum, a sum and a weighted sum of its own, and segments are merged from left to right by one
formula. Where a segment is computed makes no difference to the result: in the loop of one program, or by one of
several whose last one to arrive merges them all. A row that is decoded alone therefore gets the bits that it gets
among the rows of a verified draft.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.cuda.launching import INTERPRETED, launch, power_of_two

SEGMENTS_MAX = 96
"""The most segments of the longest text that tables can hold."""
SEGMENT_MIN = 128
PROGRAMS = 264
"""The number of programs up to which keys are split: two for each processor of an H200."""
LOG2E = 1.4426950408889634

_LOG2E = tl.constexpr(LOG2E)
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def _merge(m, total, acc, m_more, total_more, acc_more):
    """Merges the keys of a segment, or of a block of one, into those before it."""
    m_new = tl.maximum(m, m_more)
    # A row that reads no key yet has the maximum -inf.
    safe = tl.where(m_new == _NONE, 0.0, m_new)
    scale, scale_more = tl.exp2(m - safe), tl.exp2(m_more - safe)
    total = total * scale + total_more * scale_more
    acc = acc * scale[:, None] + acc_more * scale_more[:, None]
    return m_new, total, acc


@triton.jit
def _block(
    q,
    keys,
    values,
    table,
    start,
    low,
    high,
    first,
    stop,
    scale,
    cap,
    k_page,
    k_slot,
    v_page,
    v_slot,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Returns the maximum, the sum and the weighted sum of the keys at [start, start + BLOCK)."""
    d = tl.arange(0, DIM_PAD)
    at = start + tl.arange(0, BLOCK)
    there = (at >= low) & (at < high)
    page = tl.load(table + at // PAGE_TOKENS, mask=there, other=0).to(tl.int64)
    slot = at % PAGE_TOKENS
    inside = there[:, None] & (d < DIM)[None, :]
    k = tl.load(keys + (page * k_page + slot * k_slot)[:, None] + d[None, :], mask=inside, other=0.0)
    v = tl.load(values + (page * v_page + slot * v_slot)[:, None] + d[None, :], mask=inside, other=0.0)
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    if WIDE:
        s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_CAP:
        s = s * (scale / cap)
        s = (1.0 - 2.0 / (tl.exp(2.0 * s) + 1.0)) * (cap * _LOG2E)
    else:
        s = s * (scale * _LOG2E)
    reads = (at[None, :] >= first[:, None]) & (at[None, :] < stop[:, None])
    s = tl.where(reads, s, _NONE)
    m = tl.max(s, axis=1)
    p = tl.exp2(s - tl.where(m == _NONE, 0.0, m)[:, None])
    total = tl.sum(p, axis=1)
    if WIDE:
        acc = tl.dot(p.to(q.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(p.to(q.dtype), v, input_precision="ieee")
    return m, total, acc


@triton.jit
def attend_kernel(
    queries,
    keys,
    values,
    out,
    tables,
    table_rows,
    first_key,
    stop_key,
    query_start_loc,
    sinks,
    parts,
    sums,
    arrived,
    num_spans,
    scale,
    cap,
    q_stride,
    out_stride,
    table_stride,
    k_page,
    k_head,
    k_slot,
    v_page,
    v_head,
    v_slot,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIFORM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Which rows are the tile's? Span s has its first tile at query_start_loc[s] // TILE_ROWS + s, or later.
    if UNIFORM > 0:
        tiles_of_span: tl.constexpr = (UNIFORM + TILE_ROWS - 1) // TILE_ROWS
        first_row = tile // tiles_of_span * UNIFORM + tile % tiles_of_span * TILE_ROWS
        end_row = tile // tiles_of_span * UNIFORM + UNIFORM
    else:
        low_span = 0
        high_span = num_spans
        while low_span < high_span:
            middle = (low_span + high_span) // 2
            if tl.load(query_start_loc + middle).to(tl.int32) // TILE_ROWS + middle <= tile:
                low_span = middle + 1
            else:
                high_span = middle
        span = low_span - 1
        begin = tl.load(query_start_loc + span).to(tl.int32)
        first_row = begin + (tile - begin // TILE_ROWS - span) * TILE_ROWS
        end_row = tl.load(query_start_loc + span + 1).to(tl.int32)
    if first_row >= end_row:
        return
    m_index = tl.arange(0, TILE_M)
    row = first_row + m_index // GROUP
    head = kv_head * GROUP + m_index % GROUP
    there = (m_index < TILE_ROWS * GROUP) & (row < end_row)
    first = tl.load(first_key + row, mask=there, other=0).to(tl.int32)
    stop = tl.load(stop_key + row, mask=there, other=0).to(tl.int32)
    # Loaded before anything waits for the ranges.
    table = tables + tl.load(table_rows + first_row) * table_stride
    d = tl.arange(0, DIM_PAD)
    inside = there[:, None] & (d < DIM)[None, :]
    q = tl.load(queries + (row.to(tl.int64) * q_stride + head * DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    reading = there & (stop > first)
    low = tl.min(tl.where(reading, first, 2147483647), axis=0)
    high = tl.max(tl.where(reading, stop, 0), axis=0)
    low = tl.minimum(low, high)
    first_segment, end_segment = low // SEGMENT, (high + SEGMENT - 1) // SEGMENT
    count = end_segment - first_segment
    if SPLITS > 1:
        if split >= tl.maximum(count, 1):
            return
    keys += kv_head * k_head
    values += kv_head * v_head
    m = tl.full((TILE_M,), _NONE, tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, DIM_PAD), tl.float32)
    cell = (tile * tl.num_programs(1) + kv_head).to(tl.int64)
    for number in range(split, count, SPLITS):
        start = (first_segment + number) * SEGMENT
        m_part, total_part, acc_part = _block(
            q, keys, values, table, start, low, high, first, stop, scale, cap, k_page, k_slot, v_page, v_slot,
            DIM, DIM_PAD, PAGE_TOKENS, BLOCK, HAS_CAP, WIDE,
        )  # fmt: skip
        if SEGMENT > BLOCK:
            for place in range(1, SEGMENT // BLOCK):
                m_more, total_more, acc_more = _block(
                    q, keys, values, table, start + place * BLOCK, low, high, first, stop, scale, cap,
                    k_page, k_slot, v_page, v_slot, DIM, DIM_PAD, PAGE_TOKENS, BLOCK, HAS_CAP, WIDE,
                )  # fmt: skip
                m_part, total_part, acc_part = _merge(m_part, total_part, acc_part, m_more, total_more, acc_more)
        if SPLITS > 1 and count > 1:
            at = (cell * PARTS + number) * TILE_M + m_index
            tl.store(parts + at[:, None] * DIM_PAD + d[None, :], acc_part)
            tl.store(sums + 2 * at, m_part)
            tl.store(sums + 2 * at + 1, total_part)
        else:
            m, total, acc = _merge(m, total, acc, m_part, total_part, acc_part)
    if SPLITS > 1 and count > 1:
        # The last program of a tile to arrive here merges the segments of all, in their order.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + cell, 1, sem="acq_rel")
        if before + 1 < tl.minimum(count, SPLITS):
            return
        tl.store(arrived + cell, 0)
        for number in range(0, count):
            at = (cell * PARTS + number) * TILE_M + m_index
            m_part = tl.load(sums + 2 * at, cache_modifier=".cg")
            total_part = tl.load(sums + 2 * at + 1, cache_modifier=".cg")
            acc_part = tl.load(parts + at[:, None] * DIM_PAD + d[None, :], cache_modifier=".cg")
            m, total, acc = _merge(m, total, acc, m_part, total_part, acc_part)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * _LOG2E
        m_new = tl.maximum(m, sink)
        scale_old = tl.exp2(m - m_new)
        total = total * scale_old + tl.exp2(sink - m_new)
        acc = acc * scale_old[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at_out = (row.to(tl.int64) * out_stride + head * DIM)[:, None] + d[None, :]
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=inside)


class AttentionWorkspace:
    """The memory in which programs leave the segments that another one merges. All layers of a pass, and all passes,
    share it: launches follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._parts = torch.empty(0, device=device)
        self._sums = torch.empty(0, device=device)
        self._arrived = torch.zeros(4096, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []
        """Memory that graphs still write to."""

    def at_least(self, cells: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns memory for this many rows of partial results for each of `cells` tiles."""
        self._parts = self._grown(self._parts, cells * rows * width)
        self._sums = self._grown(self._sums, 2 * cells * rows)
        assert cells <= self._arrived.numel()
        return self._parts, self._sums, self._arrived

    def _grown(self, memory: Tensor, numbers: int) -> Tensor:
        if memory.numel() >= numbers:
            return memory
        self._outgrown.append(memory)
        return torch.empty(power_of_two(numbers), device=memory.device)


def segment_of(capacity: int) -> int:
    """Returns the length of a segment for tables that hold this many positions."""
    return max(SEGMENT_MIN, power_of_two(-(-capacity // SEGMENTS_MAX)))


def attend(
    queries: Tensor,
    layer: AttentionLayer,
    kv: PagedKV,
    metadata: AttentionMetadata,
    out: Tensor,
    workspace: AttentionWorkspace,
    *,
    uniform: int = 0,
    span_rows: int | None = None,
    splits: int | None = None,
    block: int | None = None,
) -> None:
    """Attends over pages. `uniform`: the number of rows of every span, or 0 where spans differ. `span_rows`: the most
    rows of a span, if known. `splits` and `block` override what is best for speed; they change no bit."""
    rows, spans = len(queries), len(metadata.query_start_loc) - 1
    group, dim_pad = layer.heads // layer.kv_heads, max(16, power_of_two(layer.head_dim))
    longest = uniform or span_rows or rows
    tile_m = max(16, min(64, 8192 // dim_pad, power_of_two(longest * group)), power_of_two(group))
    tile_rows = tile_m // group
    tiles = rows // uniform * -(-uniform // tile_rows) if uniform else rows // tile_rows + spans
    capacity = metadata.block_tables.shape[1] * kv.page_tokens
    segment = segment_of(capacity)
    parts = -(-capacity // segment) + 1
    if splits is None:
        splits = max(1, min(PROGRAMS // (tiles * layer.kv_heads), parts))
        splits = 1 << (splits.bit_length() - 1)
    if block is None:
        # As many keys at once as registers can hold beside the tile.
        block = segment if INTERPRETED else 128 if tile_m * dim_pad <= 32 * 64 else 64 if dim_pad <= 128 else 32
    cells = tiles * layer.kv_heads
    if splits > 1:
        memory = workspace.at_least(cells, parts * tile_m, dim_pad)
    else:
        memory = workspace.at_least(0, 0, 0)
    keys, values = kv.keys, kv.values
    assert keys.stride(3) == 1 and values.stride(3) == 1 and metadata.block_tables.stride(1) == 1
    launch(
        attend_kernel,
        (tiles, layer.kv_heads, splits),
        queries,
        keys,
        values,
        out,
        metadata.block_tables,
        metadata.table_rows,
        metadata.first_key,
        metadata.stop_key,
        metadata.query_start_loc,
        queries if layer.sinks is None else layer.sinks,
        *memory,
        spans,
        layer.scale,
        layer.softcap or 1.0,
        queries.stride(0),
        out.stride(0),
        metadata.block_tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        GROUP=group,
        DIM=layer.head_dim,
        DIM_PAD=dim_pad,
        PAGE_TOKENS=kv.page_tokens,
        TILE_M=tile_m,
        TILE_ROWS=tile_rows,
        SEGMENT=segment,
        BLOCK=block,
        PARTS=parts,
        SPLITS=splits,
        UNIFORM=uniform,
        HAS_CAP=layer.softcap is not None,
        HAS_SINKS=layer.sinks is not None,
        WIDE=INTERPRETED,
        num_warps=8 if tile_m * dim_pad >= 32 * 128 else 4,
        # Shorter rows than the matrix units' own stop the compiler's pipelining.
        num_stages=2 if dim_pad >= 64 else 1,
        enable_fp_fusion=False,
    )
