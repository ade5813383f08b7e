"""The last part of `outrider.backends.reference.draw` as one kernel: scale, add noise, take the argmax.

It agrees with the reference to the last bit: the same hash, the same series in the same order, and no fused
multiply-add.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from outrider.backends.keyed_noise import FIRST, GAMMA, LN2, LOG_SERIES, SECOND, SQRT_HALF

BLOCK = 2048

_GAMMA, _FIRST, _SECOND = tl.constexpr(GAMMA), tl.constexpr(FIRST), tl.constexpr(SECOND)
_LN2, _SQRT_HALF = tl.constexpr(LN2), tl.constexpr(SQRT_HALF)
_L0, _L1, _L2, _L3, _L4, _L5, _L6 = (tl.constexpr(coefficient) for coefficient in LOG_SERIES)
_MANTISSA, _HALF = tl.constexpr((1 << 52) - 1), tl.constexpr(1022 << 52)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _double(value, like):
    # Triton may take a literal beside a tensor for float32.
    return tl.full(like.shape, value, tl.float64)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log(x):
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & _MANTISSA) | _HALF).to(tl.float64, bitcast=True)
    exponent = ((bits >> 52) - 1022).to(tl.float64)
    one = _double(1.0, x)
    small = mantissa < _double(_SQRT_HALF, x)
    mantissa = tl.where(small, mantissa + mantissa, mantissa)
    exponent = tl.where(small, exponent - one, exponent)
    s = (mantissa - one) / (mantissa + one)
    q = s * s
    total = _double(_L6, x) * q + _double(_L5, x)
    total = total * q + _double(_L4, x)
    total = total * q + _double(_L3, x)
    total = total * q + _double(_L2, x)
    total = total * q + _double(_L1, x)
    total = total * q + _double(_L0, x)
    return exponent * _double(_LN2, x) + s * total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _best_of_block(
    logits,
    stride,
    kept,
    top,
    temperature,
    log_min_p,
    key,
    scores,
    tokens,
    vocab,
    FILTERED: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    x = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float64)
    y = (x - tl.load(top + row).to(tl.float64)) / tl.load(temperature + row)
    possible = inside & (y >= tl.load(log_min_p + row))
    if FILTERED:
        possible = possible & (tl.load(kept + row * vocab + token, mask=inside, other=0) != 0)
    gamma = tl.full((SIZE,), _GAMMA, tl.uint64)
    bits = tl.load(key + row).to(tl.uint64, bitcast=True) + (token + 1).to(tl.uint64) * gamma
    bits = (bits ^ (bits >> 30)) * tl.full((SIZE,), _FIRST, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full((SIZE,), _SECOND, tl.uint64)
    bits = (bits ^ (bits >> 31)) >> 12
    uniform = (bits.to(tl.float64) + _double(0.5, y)) * _double(2.220446049250313e-16, y)
    score = tl.where(possible, y - _log(-_log(uniform)), float("-inf"))
    best = tl.max(score, axis=0)
    at = row * tl.num_programs(1) + block
    tl.store(scores + at, best)
    tl.store(tokens + at, tl.min(tl.where(score == best, token, vocab), axis=0).to(tl.int64))


def pick(
    logits: Tensor, top: Tensor, temperature: Tensor, log_min_p: Tensor, key: Tensor, kept: Tensor | None
) -> Tensor:
    """Returns one token id for each row. `top` is the largest logit of each row; `kept` (bool [rows, vocab]) are the
    tokens that the filters keep."""
    num_rows, vocab = logits.shape
    num_blocks = -(-vocab // BLOCK)
    scores = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1 and (kept is None or kept.is_contiguous())
    _best_of_block[num_rows, num_blocks](
        logits,
        logits.stride(0),
        scores if kept is None else kept.view(torch.uint8),
        top,
        temperature,
        log_min_p,
        key,
        scores,
        tokens,
        vocab,
        FILTERED=kept is not None,
        SIZE=BLOCK,
        enable_fp_fusion=False,
    )
    return tokens.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0]
