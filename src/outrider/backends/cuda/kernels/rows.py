"""What is computed of each row by itself: embeddings, norms with their residual, and gated activations."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.backends.cuda.kernels.linear import ACTIVATIONS, activate
from outrider.backends.cuda.kernels.rotate import normed
from outrider.backends.cuda.launching import INTERPRETED, launch, power_of_two
from outrider.models.spec import Activation


@triton.jit
def embed_kernel(
    token_ids,
    table,
    out,
    rows,
    limit,
    scale,
    table_stride,
    out_stride,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row, mask=row < rows, other=0)
    # An id outside the table must read nothing; its row is NaN, and the sampler says so.
    known = (token >= 0) & (token < limit)
    inside = (row < rows)[:, None] & (at < WIDTH)[None, :]
    x = tl.load(table + token[:, None] * table_stride + at[None, :], mask=inside & known[:, None], other=float("nan"))
    if SCALED:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + at[None, :], x, mask=inside)


@triton.jit
def norm_kernel(
    x,
    weight,
    residual,
    out,
    rows,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    WIDTH: tl.constexpr,
    SAME: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < WIDTH)[None, :]
    wide = tl.load(x + row[:, None] * x_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
    scale = tl.load(weight + at, mask=at < WIDTH, other=0.0).to(tl.float32)[None, :]
    y = normed(wide, scale, rstd, SAME, x.dtype.element_ty)
    if HAS_RESIDUAL:
        before = tl.load(residual + row[:, None] * residual_stride + at[None, :], mask=inside, other=0.0)
        y = (before.to(tl.float32) + y.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(out + row[:, None] * out_stride + at[None, :], y, mask=inside)


@triton.jit
def gate_kernel(
    gate_up,
    out,
    rows,
    width,
    stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    here = gate_up + row[:, None] * stride + at[None, :]
    gate = tl.load(here, mask=inside, other=0.0)
    up = tl.load(here + width, mask=inside, other=0.0)
    y = activate(gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
    tl.store(out + row[:, None] * out_stride + at[None, :], y.to(gate.dtype), mask=inside)


def _rows_at_once(rows: int) -> int:
    return power_of_two(min(rows, 512)) if INTERPRETED else 1


def embed(token_ids: Tensor, table: Tensor, scale: float, out: Tensor) -> None:
    """Writes the embeddings of token ids, times a scale that has been rounded to their type."""
    rows, width = out.shape
    at_once, block = _rows_at_once(rows), min(power_of_two(width), 1024)
    launch(
        embed_kernel,
        (-(-rows // at_once), -(-width // block)),
        token_ids,
        table,
        out,
        rows,
        table.shape[0],
        scale,
        table.stride(0),
        out.stride(0),
        WIDTH=width,
        SCALED=scale != 1.0,
        ROWS=at_once,
        BLOCK=block,
    )


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, *, residual: Tensor | None = None) -> None:
    """Writes the root-mean-square norm of each row, plus the residual if there is one."""
    rows, width = x.shape
    at_once, block = _rows_at_once(rows), power_of_two(width)
    assert x.stride(1) == 1
    launch(
        norm_kernel,
        (-(-rows // at_once),),
        x,
        weight,
        x if residual is None else residual,
        out,
        rows,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        WIDTH=width,
        SAME=weight.dtype == x.dtype,
        HAS_RESIDUAL=residual is not None,
        ROWS=at_once,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )


def gate(gate_up: Tensor, activation: Activation, out: Tensor) -> None:
    """Writes act(gate) * up, of rows that hold first the gates and then the ups."""
    rows, width = out.shape
    at_once, block = _rows_at_once(rows), min(power_of_two(width), 1024)
    launch(
        gate_kernel,
        (-(-rows // at_once), -(-width // block)),
        gate_up,
        out,
        rows,
        width,
        gate_up.stride(0),
        out.stride(0),
        ACTIVATION=ACTIVATIONS[activation],
        ROWS=at_once,
        BLOCK=block,
    )
