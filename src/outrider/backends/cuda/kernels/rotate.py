"""Head norms, rotary embedding and the write to pages, in one launch.

A vector is one head of one row. Vector i belongs to row i // heads, and the heads of a row are its query heads, then
its key heads; a key head's program also moves the value of that head:

    qkv row:  [ query heads | key heads | value heads ]
                   |              |            |
                queries         pages        pages, as they are
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.cuda.launching import INTERPRETED, launch, power_of_two


@triton.jit
def normed(x, weight, rstd, SAME: tl.constexpr, dtype: tl.constexpr):
    """Scales float32 x. A weight of the type of the rows is multiplied after rounding, another one before."""
    if SAME:
        y = (x * rstd).to(dtype).to(tl.float32) * weight
    else:
        y = x * rstd * weight
    return y.to(dtype)


@triton.jit
def rotate_kernel(
    qkv,
    queries,
    keys,
    values,
    rotary,
    positions,
    slot_mapping,
    q_norm,
    k_norm,
    eps,
    vectors,
    qkv_stride,
    queries_stride,
    rotary_stride,
    k_page,
    k_head,
    k_slot,
    v_page,
    v_head,
    v_slot,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = vector // (HEADS + KV_HEADS)
    head = vector % (HEADS + KV_HEADS)
    d = tl.arange(0, DIM_PAD)
    there = vector < vectors
    inside = there[:, None] & (d < DIM)[None, :]
    rotated = d < 2 * HALF
    pair = tl.where(d < HALF, d + HALF, tl.where(rotated, d - HALF, d))
    at = row.to(tl.int64) * qkv_stride + head * DIM
    dtype = qkv.dtype.element_ty
    x = tl.load(qkv + at[:, None] + d[None, :], mask=inside, other=0.0)
    other = tl.load(qkv + at[:, None] + pair[None, :], mask=inside, other=0.0)
    is_query = head < HEADS
    if HAS_NORM:
        wide = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
        k_weight = tl.load(k_norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        k_pair = tl.load(k_norm + pair, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        q_weight, q_pair = k_weight, k_pair
        if HEADS > 0:
            q_weight = tl.load(q_norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
            q_pair = tl.load(q_norm + pair, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        weight = tl.where(is_query[:, None], q_weight, k_weight)
        pair_weight = tl.where(is_query[:, None], q_pair, k_pair)
        x = normed(wide, weight, rstd, SAME, dtype)
        other = normed(other.to(tl.float32), pair_weight, rstd, SAME, dtype)
    position = tl.load(positions + row, mask=there, other=0)
    angle = position[:, None] * rotary_stride + (d % HALF)[None, :]
    turns = inside & rotated[None, :]
    cos = tl.load(rotary + angle, mask=turns, other=1.0)
    sin = tl.load(rotary + angle + HALF, mask=turns, other=0.0)
    sin = tl.where((d < HALF)[None, :], -sin, sin)
    y = (x.to(tl.float32) * cos + other.to(tl.float32) * sin).to(dtype)
    if HEADS > 0:
        at_queries = row.to(tl.int64) * queries_stride + head * DIM
        tl.store(queries + at_queries[:, None] + d[None, :], y, mask=inside & is_query[:, None])
    is_key = inside & (head >= HEADS)[:, None]
    slot = tl.load(slot_mapping + row, mask=there, other=0)
    page, offset, kv_head = slot // PAGE_TOKENS, slot % PAGE_TOKENS, head - HEADS
    at_key = page * k_page + kv_head * k_head + offset * k_slot
    tl.store(keys + at_key[:, None] + d[None, :], y.to(keys.dtype.element_ty), mask=is_key)
    at_value = page * v_page + kv_head * v_head + offset * v_slot
    value = tl.load(qkv + (at + KV_HEADS * DIM)[:, None] + d[None, :], mask=is_key, other=0.0)
    tl.store(values + at_value[:, None] + d[None, :], value.to(values.dtype.element_ty), mask=is_key)


def rotate(
    qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata, queries: Tensor | None
) -> None:
    """Norms and rotates the heads of all rows: queries go to `queries`, keys and values to the slots of their rows.
    Without `queries`, the rows hold keys and values only."""
    heads = 0 if queries is None else layer.heads
    rows, dim = len(qkv), layer.head_dim
    vectors = rows * (heads + layer.kv_heads)
    dim_pad = power_of_two(dim)
    block = min(power_of_two(vectors), 1024) if INTERPRETED else max(1, min(2048 // dim_pad, 16))
    keys, values = kv.keys, kv.values
    assert qkv.stride(1) == 1 and keys.stride(3) == 1 and values.stride(3) == 1
    norm = layer.k_norm
    launch(
        rotate_kernel,
        (-(-vectors // block),),
        qkv,
        qkv if queries is None else queries,
        keys,
        values,
        layer.rotary,
        metadata.positions,
        metadata.slot_mapping,
        qkv if layer.q_norm is None else layer.q_norm,
        qkv if norm is None else norm,
        layer.norm_eps,
        vectors,
        qkv.stride(0),
        0 if queries is None else queries.stride(0),
        layer.rotary.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        HEADS=heads,
        KV_HEADS=layer.kv_heads,
        DIM=dim,
        DIM_PAD=dim_pad,
        HALF=layer.rotary.shape[1] // 2,
        PAGE_TOKENS=kv.page_tokens,
        HAS_NORM=norm is not None,
        SAME=norm is not None and norm.dtype == qkv.dtype,
        BLOCK=block,
        num_warps=1 if block * dim_pad <= 256 else 4,
        enable_fp_fusion=False,
    )
