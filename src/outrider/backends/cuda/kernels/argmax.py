"""The largest logit of each row, its token and its softmax probability, without a round trip to the host.

Logits are compared as integers that have the same order: NaN is larger than any number, and the lowest id wins among
equal logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.cuda.launching import INTERPRETED, launch, power_of_two

BLOCK = 2048


@triton.jit
def block_argmax_kernel(
    logits,
    best,
    sums,
    stride,
    vocab,
    PROBABILITIES: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    # The two zeros are equal, and so are all NaN.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    word = tl.where(token < vocab, (order << 32) + (0x7FFFFFFF - token).to(tl.int64), -0x7FFFFFFFFFFFFFFF)
    at = row * tl.num_programs(1) + block
    tl.store(best + at, tl.max(word, axis=0))
    if PROBABILITIES:
        top = tl.max(x, axis=0)
        safe = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + 2 * at, top)
        tl.store(sums + 2 * at + 1, tl.sum(tl.exp(x - safe), axis=0))


@triton.jit
def merge_argmax_kernel(
    logits,
    best,
    sums,
    out,
    stride,
    blocks,
    PROBABILITIES: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, SIZE)
    there = block < blocks
    at = row * blocks + block
    word = tl.max(tl.load(best + at, mask=there, other=-0x7FFFFFFFFFFFFFFF), axis=0)
    token = 0x7FFFFFFF - (word & 0xFFFFFFFF)
    tl.store(out + 3 * row, token.to(tl.float64))
    tl.store(out + 3 * row + 1, tl.load(logits + row * stride + token).to(tl.float64))
    if PROBABILITIES:
        top = tl.load(sums + 2 * at, mask=there, other=float("-inf"))
        total = tl.load(sums + 2 * at + 1, mask=there, other=0.0)
        highest = tl.max(top, axis=0)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        tl.store(out + 3 * row + 2, 1.0 / tl.sum(total * tl.exp(top - safe), axis=0).to(tl.float64))


def argmax(logits: Tensor, *, probabilities: bool) -> Tensor:
    """Returns float64 [rows, 3]: token, logit and probability. Without `probabilities` the last one is undefined."""
    rows, vocab = logits.shape
    size = power_of_two(vocab) if INTERPRETED else BLOCK
    blocks = -(-vocab // size)
    assert logits.stride(1) == 1
    best = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    sums = torch.empty(rows, blocks, 2, device=logits.device)
    out = torch.empty(rows, 3, dtype=torch.float64, device=logits.device)
    launch(
        block_argmax_kernel,
        (rows, blocks),
        logits,
        best,
        sums,
        logits.stride(0),
        vocab,
        PROBABILITIES=probabilities,
        SIZE=size,
    )
    launch(
        merge_argmax_kernel,
        (rows,),
        logits,
        best,
        sums,
        out,
        logits.stride(0),
        blocks,
        PROBABILITIES=probabilities,
        SIZE=power_of_two(blocks),
        num_warps=1,
    )
    return out
