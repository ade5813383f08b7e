"""Every kernel compiled for an H200, as real models specialise it: nothing spills, and products use matrix units.

`test_triton.py` runs this in a process that has Triton without its interpreter. It needs no GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tests.backends.cuda.ahead import SHARED_BYTES_MAX, SPILLED_BYTES_MAX, compiled, launches_of, unlike
from torch import Tensor

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.cuda.backend import CudaBackend
from outrider.backends.cuda.kernels import rotate
from outrider.backends.cuda.kernels.attention import attend
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

LAYOUT = torch.device("meta")
SPANS = [(1, 1), (8, 1), (32, 32), (48, 6), (256, 256), (600, 1)]
"""Rows and spans: one decoded row, a block, decoded rows, verified drafts, a large batch, and a prompt's chunk."""


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    norms: bool = False
    softcap: float | None = None
    sinks: bool = False
    activation: Activation = Activation.SILU
    dtype: torch.dtype = torch.bfloat16


MODELS = {
    "SmolLM2-135M": Shape(9, 3, 64, 576, 1536),
    "SmolLM2-135M, fp16": Shape(9, 3, 64, 576, 1536, dtype=torch.float16),
    "Qwen3-8B": Shape(32, 8, 128, 4096, 12288, norms=True),
    "Gemma 2": Shape(8, 4, 256, 2304, 9216, softcap=50.0, activation=Activation.GELU_TANH),
    "gpt-oss": Shape(64, 8, 64, 2880, 2880, sinks=True, activation=Activation.CLAMPED_SWIGLU),
}


def one_layer(of: Shape, rows: int, spans: int) -> None:
    """Calls everything that one layer, the embedding and the head call."""

    def empty(*shape: int, dtype: torch.dtype = of.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=LAYOUT)

    def words(count: int) -> Tensor:
        return empty(count, dtype=torch.int64)

    backend = CudaBackend(LAYOUT)
    layer = AttentionLayer(
        heads=of.heads,
        kv_heads=of.kv_heads,
        head_dim=of.dim,
        scale=of.dim**-0.5,
        rotary=empty(8192, of.dim, dtype=torch.float32),
        q_norm=empty(of.dim) if of.norms else None,
        k_norm=empty(of.dim) if of.norms else None,
        softcap=of.softcap,
        sinks=empty(of.heads) if of.sinks else None,
    )
    arena = empty(100, 2, 2, of.kv_heads, 16, of.dim)
    kv = PagedKV(keys=arena[:, 1, 0], values=arena[:, 1, 1])
    metadata = AttentionMetadata(
        positions=words(rows),
        slot_mapping=words(rows),
        table_rows=words(rows),
        block_tables=empty(64, 513, dtype=torch.int32),
        query_start_loc=words(spans + 1),
        seq_lens=words(spans),
        first_key=words(rows),
        stop_key=words(rows),
        max_keys=8192,
    )
    norm, wide_norm = empty(of.hidden), empty(of.hidden, dtype=torch.float32)
    x = backend.embed(words(rows), empty(49152, of.hidden), 1.0)
    width = of.heads * of.dim
    qkv = backend.project(x, Linear(weight=empty(width + 2 * of.kv_heads * of.dim, of.hidden)), norm=norm, eps=1e-5)
    queries = empty(rows, width)
    rotate.rotate(qkv, layer, kv, metadata, queries)
    rotate.rotate(qkv[:, width:], layer, kv, metadata, None)
    out = torch.empty_like(queries)
    uniform = rows // spans if rows == spans or (spans == 1 and rows < 64) else 0
    attend(queries, layer, kv, metadata, out, backend.workspace, uniform=uniform, span_rows=rows // spans)
    x = backend.project_add(out, Linear(weight=empty(of.hidden, width)), x)
    gate_up = Linear(weight=empty(2 * of.inner, of.hidden))
    inner = backend.gated(x, gate_up, of.activation, norm=wide_norm, eps=1e-5)
    down = Linear(weight=empty(of.hidden, of.inner), bias=empty(of.hidden))
    x = backend.project_add(inner, down, x)
    x = backend.project_add(inner, down, x, post_norm=wide_norm)
    scores = backend.project(x, Linear(weight=empty(49152, of.hidden)), norm=norm, eps=1e-5)
    backend.argmax(scores.float(), probabilities=True)


@pytest.mark.parametrize("of", MODELS.values(), ids=MODELS)
def test_no_kernel_spills_and_products_use_matrix_units(of: Shape) -> None:
    launches = [launch for shape in SPANS for launch in launches_of(lambda shape=shape: one_layer(of, *shape))]
    names = set()
    for launch in unlike(launches):
        found = compiled(launch)
        names.add(found.name)
        assert found.spilled_bytes <= SPILLED_BYTES_MAX, found[:-1]
        assert found.shared_bytes <= SHARED_BYTES_MAX, found[:-1]
        if found.name in ("linear_kernel", "attend_kernel"):
            assert "mma.sync" in found.ptx or "wgmma" in found.ptx, found[:-1]
    assert {"linear_kernel", "attend_kernel", "rotate_kernel", "embed_kernel", "gate_kernel", "norm_kernel"} <= names
