"""Products of a few rows with a weight matrix, with what comes after them in the same launch.

    y = act(x Wᵀ + b)                the gated activation reads two rows of W for each output
    y = residual + (x Wᵀ + b)

The sum over K runs in one order, whatever the number of rows, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.cuda.launching import INTERPRETED, launch, power_of_two
from outrider.models.spec import Activation

ROWS_MAX = 64
"""The most rows for which this kernel is used. With more, PyTorch's library is faster."""
LINES_MAX = 32
"""The most cache lines of a row of weights that are fetched ahead: the second-level cache is small beside large
matrices."""
ACTIVATIONS = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2, Activation.CLAMPED_SWIGLU: 3}


@triton.jit
def activate(gate, up, KIND: tl.constexpr):
    """Returns act(gate) * up of float32 numbers."""
    if KIND == 1:
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == 2:
        # tanh, written with exp: a Triton without libdevice has no other.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)) * up
    else:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return y


@triton.jit
def _product(x, w, acc, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), acc, input_precision="ieee")
    return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def _prefetch(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    x_stride,
    w_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_m, in_n = m < rows, n < OUTPUTS
    dtype = x.dtype.element_ty
    at_x = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    at_w = weight + n.to(tl.int64)[:, None] * w_stride + k[None, :]
    if OVERLAP:
        # Weights come from memory while the kernel before this one still runs.
        ahead = tl.arange(0, LINES) * LINE
        near = tl.minimum(n, OUTPUTS - 1).to(tl.int64)[:, None] * w_stride + tl.minimum(ahead, K - 1)[None, :]
        _prefetch(weight + near)
        if ACTIVATION > 0:
            _prefetch(weight + near + OUTPUTS * w_stride)
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        in_k = start + k < K
        a = tl.load(at_x + start, mask=in_m[:, None] & in_k[None, :], other=0.0)
        w = tl.load(at_w + start, mask=in_n[:, None] & in_k[None, :], other=0.0)
        acc = _product(a, w, acc, WIDE)
        if ACTIVATION > 0:
            up = tl.load(at_w + start + OUTPUTS * w_stride, mask=in_n[:, None] & in_k[None, :], other=0.0)
            acc_up = _product(a, up, acc_up, WIDE)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    y = acc.to(dtype)
    if ACTIVATION > 0:
        if HAS_BIAS:
            acc_up += tl.load(bias + OUTPUTS + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        y = activate(y.to(tl.float32), acc_up.to(dtype).to(tl.float32), ACTIVATION).to(dtype)
    inside = in_m[:, None] & in_n[None, :]
    if HAS_RESIDUAL:
        before = tl.load(residual + m.to(tl.int64)[:, None] * residual_stride + n[None, :], mask=inside, other=0.0)
        y = (before.to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], y, mask=inside)


class Tiles(NamedTuple):
    """How a product is cut. The part of K that is summed at once depends on the matrix only, never on the rows."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def tiles_of(rows: int, outputs: int, k: int, *, wide: bool, gated: bool) -> Tiles:
    """Returns the tiles that were fastest on an H200. `wide`: of float32 numbers."""
    if INTERPRETED:
        return Tiles(max(16, power_of_two(rows)), max(16, min(power_of_two(outputs), 2048)), power_of_two(k), 4, 1)
    block_m = 16 if rows <= 16 else 32
    if wide:
        return Tiles(block_m, 16, 64, 4, 2)
    if outputs >= 16_384:
        return Tiles(block_m, 128, 64, 2, 4)
    if gated:
        return Tiles(block_m, 16, 128, 2, 4)
    if outputs * k >= 1 << 22:
        return Tiles(block_m, 16, 256, 4, 4)
    if k >= 1024:
        return Tiles(block_m, 8, 512, 2, 4) if block_m == 16 else Tiles(block_m, 8, 256, 2, 6)
    return Tiles(block_m, 8, 64, 2, 6)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    tiles: Tiles | None = None,
) -> None:
    rows, k = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    assert x.stride(1) == 1 and weight.stride(1) == 1 and weight.dtype == x.dtype
    if tiles is None:
        of = {"wide": x.element_size() == 4, "gated": activation is not None}
        tiles = tiles_of(rows, outputs, k, **of)
    launch(
        linear_kernel,
        (-(-outputs // tiles.block_n), -(-rows // tiles.block_m)),
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K=k,
        OUTPUTS=outputs,
        ACTIVATION=ACTIVATIONS[activation],
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        LINE=128 // x.element_size(),
        LINES=min(LINES_MAX, power_of_two(-(-k * x.element_size() // 128))),
        WIDE=INTERPRETED,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
