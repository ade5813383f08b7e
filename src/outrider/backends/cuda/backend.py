"""The CUDA backend: Triton kernels, and passes that are captured as CUDA graphs.

It also runs on Triton's interpreter, on tensors of the CPU, which is how its tests run where there is no GPU.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.base import Argmax, Backend, Body, EagerPass, Options, Pass, Result
from outrider.backends.batch import BatchBuilder, BlockTableArrays
from outrider.backends.drawing import DrawSettings
from outrider.backends.reference.backend import ReferenceBackend
from outrider.backends.reference.draw import kept_tokens
from outrider.backends.registry import BackendSettings
from outrider.kv.layout import KVLayout
from outrider.models.parameters import Linear, Matrix, plain
from outrider.models.spec import Activation

try:
    from outrider.backends.cuda.batches import CudaBatchBuilder, CudaMetadata
    from outrider.backends.cuda.graphs import BYTES_MAX, GraphPass, Graphs
    from outrider.backends.cuda.kernels import attention, linear, rotate, rows
    from outrider.backends.cuda.kernels.argmax import argmax
    from outrider.backends.cuda.kernels.draw import pick
    from outrider.backends.cuda.launching import INTERPRETED
except ImportError as error:
    _import_error: str | None = str(error)
else:
    _import_error = None


class CudaBackend(ReferenceBackend):
    """Triton kernels where they are faster than PyTorch, which computes the rest: products of many rows, experts and
    the filters of sampling."""

    name = "cuda"

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        self.graphs = Graphs(self.device)
        self.workspace = attention.AttentionWorkspace(self.device)

    # ---- layer arithmetic --------------------------------------------------------------------------

    def embed(self, token_ids: Tensor, embedding: Matrix, scale: float) -> Tensor:
        table = plain(embedding)
        out = table.new_empty(token_ids.shape[0], table.shape[1])
        rows.embed(token_ids, table, _rounded(scale, table.dtype), out)
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _rows_of(x)
        out = x.new_empty(x.shape)
        rows.norm(x, weight, eps, out)
        return out

    def project(self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return self._linear(x, linear, norm=norm, eps=eps)

    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, *, post_norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        if post_norm is None:
            return self._linear(x, linear, residual=residual)
        y = self._linear(x, linear)
        rows.norm(y, post_norm, eps, y, residual=residual)
        return y

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation, *, norm: Tensor, eps: float) -> Tensor:
        return self._linear(x, gate_up, norm=norm, eps=eps, activation=activation)

    def _linear(
        self,
        x: Tensor,
        of: Linear,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        x, weight = _rows_of(x), plain(of.weight)
        outputs = weight.shape[0] // (1 if activation is None else 2)
        if norm is not None:
            x = self.norm(x, norm, eps)
        if len(x) <= linear.ROWS_MAX:
            out = x.new_empty(len(x), outputs)
            linear.linear(x, weight, of.bias, out, residual=residual, activation=activation)
            return out
        if residual is not None and of.bias is None:
            return torch.addmm(residual, x, weight.T)
        y = functional.linear(x, weight, of.bias)
        if activation is not None:
            out = x.new_empty(len(x), outputs)
            rows.gate(y, activation, out)
            return out
        return y if residual is None else residual + y

    # ---- attention ---------------------------------------------------------------------------------

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> Tensor:
        queries = qkv.new_empty(len(qkv), layer.heads * layer.head_dim)
        rotate.rotate(_rows_of(qkv), layer, kv, metadata, queries)
        out = torch.empty_like(queries)
        uniform, span_rows = 0, None
        # Rows of the padding may be missing from the metadata, and with them the last span of a uniform batch.
        if isinstance(metadata, CudaMetadata) and (not metadata.uniform or len(qkv) % metadata.uniform == 0):
            uniform, span_rows = metadata.uniform, metadata.span_rows
        attention.attend(queries, layer, kv, metadata, out, self.workspace, uniform=uniform, span_rows=span_rows)
        return out

    def store(self, pairs: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> None:
        rotate.rotate(_rows_of(pairs), layer, kv, metadata, None)

    # ---- passes ------------------------------------------------------------------------------------

    def compile_pass(self, body: Body[Options, Result], *, static: bool = True) -> Pass[Options, Result]:
        return GraphPass(self.graphs, body) if static else EagerPass(body)

    # ---- batches and sampling ----------------------------------------------------------------------

    def batch_builder(self, layout: KVLayout, tables: BlockTableArrays) -> BatchBuilder:
        return CudaBatchBuilder(layout, tables, self.device)

    def argmax(self, logits: Tensor, *, probabilities: bool = False) -> Argmax:
        return CudaArgmax(argmax(logits, probabilities=probabilities), logits if not probabilities else None)

    def draw(self, logits: Tensor, settings: DrawSettings) -> Tensor:
        kept = kept_tokens(logits, settings) if settings.filters else None
        top = logits.amax(dim=-1)
        return pick(logits, top, settings.temperature, settings.log_min_p, settings.key, kept)

    # ---- memory ------------------------------------------------------------------------------------

    def free_kv_bytes(self, memory_utilization: float) -> int:
        if self.device.type == "cpu":
            return super().free_kv_bytes(memory_utilization)
        free, total = torch.cuda.mem_get_info(self.device)
        # Graphs are captured once there are pages.
        return max(0, int(free - total * (1 - memory_utilization)) - min(BYTES_MAX, total // 32))

    def check_kv_bytes(self, kv_bytes: int) -> None:
        """On a GPU the allocation itself fails."""
        if self.device.type == "cpu":
            super().check_kv_bytes(kv_bytes)


class CudaArgmax(Argmax):
    """The argmax of logits, in the memory of the device until it is read. In a captured pass that memory belongs to the
    graph, and each replay writes it anew."""

    def __init__(self, found: Tensor, logits: Tensor | None) -> None:
        self._found = found
        self._logits = logits
        """The logits, if probabilities have not been computed with their argmax."""

    def read(self) -> tuple[list[int], list[float]]:
        # One copy, so that the host waits for the device once.
        found = self._found.tolist()
        return [int(row[0]) for row in found], [row[1] for row in found]

    def probabilities(self) -> list[float]:
        found = self._found if self._logits is None else argmax(self._logits, probabilities=True)
        return [row[2] for row in found.tolist()]

    def first(self, rows: int) -> Argmax:
        return CudaArgmax(self._found[:rows], None if self._logits is None else self._logits[:rows])


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """Returns the scale as models multiply by it: rounded to their own dtype."""
    return float(torch.tensor(scale, dtype=dtype))


def _rows_of(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def unavailable(settings: BackendSettings) -> str | None:
    """Returns why this backend cannot be used here; None if it can."""
    if _import_error is not None:
        return f"Triton cannot be imported ({_import_error})"
    if settings.device.type == "cuda" or (settings.device.type == "cpu" and INTERPRETED):
        return None
    return f"it needs a GPU, but the device is {settings.device}"


def build(settings: BackendSettings) -> Backend:
    return CudaBackend(settings.device)
