"""Kernels for many streams that advance in lockstep, one token each per step (`outrider.tools.training.generate`).

The position of the streams is read on the device, so that one recorded step serves every position.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

BLOCK_KEYS = 64
BLOCK_VOCAB = 4096
FEWEST_ROWS = 16
"""Fewest rows of a matrix product in Triton."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend_one(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    keys,
    values,
    out,
    place,
    length,
    q_rows: tl.constexpr,
    dim: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    # One key head of one stream: its query heads are the rows.
    head = tl.program_id(0).to(tl.int64)
    position = tl.load(place)
    row, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    in_row = column < dim
    in_rows = (row < q_rows)[:, None] & in_row[None, :]
    at_rows = head * q_rows * dim + row[:, None] * dim + column[None, :]
    query = tl.load(q + at_rows, mask=in_rows, other=0.0)
    new_key = tl.load(k + head * dim + column, mask=in_row, other=0.0)
    new_value = tl.load(v + head * dim + column, mask=in_row, other=0.0)
    cache = head * length * dim
    tl.store(keys + cache + position * dim + column, new_key, mask=in_row)
    tl.store(values + cache + position * dim + column, new_value, mask=in_row)
    # The new token is not read back: the sums start with it.
    highest = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1)
    total = tl.full((ROWS,), 1.0, tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, position, KEYS):
        key = start + tl.arange(0, KEYS)
        seen = key < position
        at_keys = cache + key[:, None] * dim + column[None, :]
        inside = seen[:, None] & in_row[None, :]
        some_keys = tl.load(keys + at_keys, mask=inside, other=0.0)
        some_values = tl.load(values + at_keys, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(some_keys), input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shrunk = tl.exp(highest - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrunk + tl.sum(weights, axis=1)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(some_values.dtype), some_values, input_precision="ieee")
        highest = higher
    tl.store(out + at_rows, (mixed / total[:, None]).to(out.dtype.element_ty), mask=in_rows)


def attend_one(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Writes `k` and `v`, [streams, key heads, head_dim], at `position`, and attends from `q` to all keys up to there.

    `q` is scaled, [streams, key heads, rows, head_dim]; keys and values: [streams, key heads, length, head_dim].
    """
    streams, kv_heads, rows, dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    assert keys.is_contiguous() and values.is_contiguous()
    out = torch.empty_like(q)
    _attend_one[(streams * kv_heads,)](
        q,
        k,
        v,
        keys,
        values,
        out,
        position,
        keys.shape[2],
        q_rows=rows,
        dim=dim,
        ROWS=max(FEWEST_ROWS, triton.next_power_of_2(rows)),
        DIM=max(FEWEST_ROWS, triton.next_power_of_2(dim)),
        KEYS=BLOCK_KEYS,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pick(logits, temperature, key, out, vocab, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    seed = tl.load(key) + row
    best = tl.full((SIZE,), float("-inf"), tl.float32)
    token = tl.zeros((SIZE,), tl.int32)
    for start in range(0, vocab, SIZE):
        at = start + tl.arange(0, SIZE)
        score = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
        if heat > 0:
            # Away from 0 and 1, where the noise is infinite.
            uniform = tl.minimum(tl.maximum(tl.rand(seed, at), 1e-10), 1.0 - 1e-7)
            score -= heat * tl.log(-tl.log(uniform))
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, at, token)
    tl.store(out + row, tl.min(tl.where(best == tl.max(best, axis=0), token, vocab), axis=0).to(tl.int64))


def pick(logits: Tensor, temperature: Tensor, key: Tensor) -> Tensor:
    """Samples a token per row of float32 logits by Gumbel noise at the row's temperature; 0 is greedy.

    `key`, one integer on the device, seeds the noise: row i uses key + i.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _pick[(rows,)](logits, temperature.contiguous(), key, out, vocab, SIZE=BLOCK_VOCAB, num_warps=8)
    return out
