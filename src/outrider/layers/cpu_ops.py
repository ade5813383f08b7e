"""Operations on a CPU, by compiled kernels: a row's result is the same to the last bit in any batch."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import ConfigError
from outrider.layers.attention import AttentionLayer, AttentionRows, PagedKV
from outrider.layers.ops import Ops, route
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear
from outrider.models.spec import Activation, ExpertsSpec

try:
    from outrider.kernels import activations, attention, jobs, linear, norm, rotate
    from outrider.kernels.compiling import Kernel
    from outrider.kernels.pool import ENTER, RUN_ATTEND, RUN_LINEAR, RUN_NORM
    from outrider.kernels.threads import Threads, available_cores, shared_threads
    from outrider.kernels.vector import BFLOAT16, FAST_HERE, FLOAT16, FLOAT32
except ImportError as error:
    _import_error: str | None = str(error)
else:
    _import_error = None
    _ITEMS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
    _ACTIVATIONS = {
        Activation.SILU: activations.SILU,
        Activation.GELU_TANH: activations.GELU_TANH,
        Activation.CLAMPED_SWIGLU: activations.CLAMPED_SWIGLU,
    }

Progress = Callable[[str, int, int], None]
"""Called with what is being compiled, how many kernels are done, and how many there are."""

_HEADER = struct.Struct("4q")
_NORM = struct.Struct("5qf4x4q")
_LINEAR = struct.Struct("14q")
_LAYER = struct.Struct("3qf4x4qf4xf4xq")
_ROWS = struct.Struct("8q")
_PLACE = struct.Struct("17q")  # from QKV to PARTS
_ROWS_CACHED_MAX = 8
_LAYERS_CACHED_MAX = 1024


class _Buffer:
    """Scratch memory that grows to what was last asked for."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._size, self._address = 0, 0

    def at_least(self, size: int) -> int:
        """Its address."""
        if self._size < size:
            self._tensor = torch.empty(size, dtype=torch.uint8)
            self._size, self._address = size, self._tensor.data_ptr()
        return self._address


class _Job:
    """A job's words, as Python writes them."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(8 * jobs.WORDS))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.words))


class NumbaOps(Ops):
    """One caller at a time. Activations are float32 whatever the weights are stored as."""

    name = "numba"
    row_exact = True

    def __init__(self, threads: int | None = None, progress: Progress | None = None) -> None:
        ENTER.compile()
        self._progress = progress
        self._threads: Threads = shared_threads(available_cores() if threads is None else threads)
        self._job, self._norm_job = _Job(), _Job()
        self._scratch, self._normed, self._queries, self._plan, self._parts = (_Buffer() for _ in range(5))
        self._layers: dict[int, tuple[AttentionLayer, bytes, list[Tensor]]] = {}
        self._rows: dict[int, tuple[AttentionRows, bytes, list[Tensor]]] = {}

    @staticmethod
    def unavailable() -> str | None:
        """Why these operations cannot be used here; None if they can."""
        if _import_error is not None:
            return f"Numba cannot be imported ({_import_error})"
        if sys.platform != "linux":
            return "threads wait by a system call that only Linux has"
        return None if FAST_HERE else "the processor lacks AVX2, FMA or F16C"

    def prepare(self, parameters: DecoderParameters) -> DecoderParameters:
        """Weights stay as they are stored; what is added or multiplied elementwise becomes float32."""
        warm_up((parameters.embedding.dtype, parameters.layers[0].qkv.weight.dtype), self._progress)
        return DecoderParameters(
            embedding=parameters.embedding,
            layers=tuple(_prepared_layer(layer) for layer in parameters.layers),
            final_norm=_wide(parameters.final_norm),
            head=_prepared(parameters.head),
        )

    def embed(self, tokens: Tensor, embedding: Tensor, scale: float) -> Tensor:
        x = functional.embedding(tokens, embedding).float()
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=embedding.dtype).float()

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _rows_of(x), _wide(weight)
        out = torch.empty(x.shape, dtype=torch.float32)
        self._pack_norm(self._job, x, weight, eps, out.data_ptr())
        ENTER.call(self._threads.address, self._job.address, RUN_NORM, 0)
        return out

    def project(self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return self._linear(x, linear.weight, linear.bias, norm=norm, eps=eps)

    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, *, post_norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        residual = _rows_of(residual)
        if post_norm is None:
            return self._linear(x, linear.weight, linear.bias, residual=residual)
        y = self._linear(x, linear.weight, linear.bias)
        self._pack_norm(self._job, y, _wide(post_norm), eps, y.data_ptr(), residual=residual)
        ENTER.call(self._threads.address, self._job.address, RUN_NORM, 0)
        return y

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation, *, norm: Tensor, eps: float) -> Tensor:
        return self._linear(x, gate_up.weight, gate_up.bias, norm=norm, eps=eps, activation=activation)

    def experts(
        self, x: Tensor, mlp: ExpertsMLP, experts: ExpertsSpec, activation: Activation, *, norm: Tensor, eps: float
    ) -> Tensor:
        x = self.norm(x, norm, eps)
        weights, chosen = route(self._linear(x, mlp.router.weight, mlp.router.bias), experts)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            row, place = (chosen == expert).nonzero(as_tuple=True)
            gate_up_bias = None if mlp.gate_up_bias is None else mlp.gate_up_bias[expert]
            down_bias = None if mlp.down_bias is None else mlp.down_bias[expert]
            inner = self._linear(x[row], mlp.gate_up[expert], gate_up_bias, activation=activation)
            y = self._linear(inner, mlp.down[expert], down_bias)
            out.index_add_(0, row, y * weights[row, place, None])
        return out

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        x = _rows_of(x)
        rows, k = x.shape
        n = weight.shape[0] // (1 if activation is None else 2)
        # A residual is updated in place: the row is read by nobody else.
        out = torch.empty((rows, n), dtype=torch.float32) if residual is None else residual
        job, norm_address = self._job, 0
        x_address, x_stride = x.data_ptr(), x.stride(0) * 4
        if norm is not None:
            norm_job, x_address, x_stride = self._norm_job, self._normed.at_least(rows * k * 4), k * 4
            norm_address = norm_job.address
            self._pack_norm(norm_job, x, norm, eps, x_address)
        kernel = linear.LINEAR[_ITEMS[weight.dtype]]
        self._pack_header(job, kernel, linear.scratch_bytes(k))
        _LINEAR.pack_into(
            job.words,
            8 * linear.X,
            x_address,
            x_stride,
            rows,
            weight.data_ptr(),
            weight.stride(0) * weight.element_size(),
            k,
            n,
            0,  # the width of a strip is planned by the kernel
            out.data_ptr(),
            out.stride(0) * 4,
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0) * 4,
            activations.NONE if activation is None else _ACTIVATIONS[activation],
        )
        ENTER.call(self._threads.address, job.address, RUN_LINEAR, norm_address)
        return out

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> Tensor:
        heads, dim, kv_heads = layer.heads, layer.head_dim, layer.kv_heads
        qkv, keys, values = _rows_of(qkv), kv.keys, kv.values
        assert keys.stride(3) == 1 and values.stride(3) == 1 and keys.dtype == values.dtype
        count, item, size = qkv.shape[0], _ITEMS[keys.dtype], keys.element_size()
        out = torch.empty((count, heads * dim), dtype=torch.float32)
        part_bytes = heads // kv_heads * attention.part_bytes(dim)
        room = 0
        if count * kv_heads < 8 * self._threads.count and self._threads.count > 1:
            room = count * kv_heads * (rows.most_keys // attention.BLOCK + 2)
        job = self._job
        self._pack_header(job, rotate.ROTATE[item], attention.scratch_bytes(heads, kv_heads, dim))
        words = job.words
        words[8 * rotate.HEADS : 8 * rotate.HEADS + _LAYER.size] = self._layer_words(layer)
        words[8 * rotate.ROWS : 8 * rotate.ROWS + _ROWS.size] = self._row_words(rows)
        key_page, key_head, key_token, _ = keys.stride()
        value_page, value_head, value_token, _ = values.stride()
        _PLACE.pack_into(
            words,
            8 * rotate.QKV,
            qkv.data_ptr(),
            qkv.stride(0) * 4,
            self._queries.at_least(count * heads * dim * 4),
            out.data_ptr(),
            heads * dim * 4,
            attention.ATTEND[item].address,
            keys.data_ptr(),
            values.data_ptr(),
            kv.page_tokens,
            key_page * size,
            key_head * size,
            key_token * size,
            value_page * size,
            value_head * size,
            value_token * size,
            self._plan.at_least(count * 16),
            self._parts.at_least(room * part_bytes),
        )
        ENTER.call(self._threads.address, job.address, RUN_ATTEND, room)
        return out

    def _pack_header(self, job: _Job, kernel: Kernel, scratch_bytes: int) -> None:
        scratch_bytes = (scratch_bytes + 63) // 64 * 64
        scratch = self._scratch.at_least(scratch_bytes * self._threads.count)
        _HEADER.pack_into(job.words, 0, kernel.address, 0, scratch, scratch_bytes)

    def _pack_norm(
        self, job: _Job, x: Tensor, weight: Tensor, eps: float, out: int, *, residual: Tensor | None = None
    ) -> None:
        rows, k = x.shape
        _HEADER.pack_into(job.words, 0, norm.NORM.address, 0, 0, 0)
        _NORM.pack_into(
            job.words,
            8 * norm.X,
            x.data_ptr(),
            x.stride(0) * 4,
            rows,
            k,
            weight.data_ptr(),
            eps,
            out,
            k * 4,
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0) * 4,
        )

    def _layer_words(self, layer: AttentionLayer) -> bytes:
        known = self._layers.get(id(layer))
        if known is not None and known[0] is layer:
            return known[1]
        if len(self._layers) >= _LAYERS_CACHED_MAX:
            self._layers.clear()
        kept = [layer.rotary.float().contiguous()]
        addresses = []
        for tensor in (layer.q_norm, layer.k_norm, layer.sinks):
            if tensor is not None:
                kept.append(_wide(tensor))
            addresses.append(0 if tensor is None else kept[-1].data_ptr())
        packed = _LAYER.pack(
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            layer.scale,
            kept[0].data_ptr(),
            layer.rotary.shape[1],
            addresses[0],
            addresses[1],
            layer.norm_eps,
            0.0 if layer.softcap is None else layer.softcap,
            addresses[2],
        )
        self._layers[id(layer)] = (layer, packed, kept)
        return packed

    def _row_words(self, rows: AttentionRows) -> bytes:
        known = self._rows.get(id(rows))
        if known is not None and known[0] is rows:
            return known[1]
        if len(self._rows) >= _ROWS_CACHED_MAX:
            self._rows.clear()
        longs = [tensor.to(torch.int64).contiguous() for tensor in (rows.positions, rows.slots)]
        ints = [
            tensor.to(torch.int32).contiguous()
            for tensor in (rows.sequence, rows.tables, rows.first_key, rows.stop_key)
        ]
        sequence, tables, first_key, stop_key = ints
        packed = _ROWS.pack(
            rows.positions.shape[0],
            longs[0].data_ptr(),
            longs[1].data_ptr(),
            sequence.data_ptr(),
            tables.data_ptr(),
            tables.stride(0) * 4,
            first_key.data_ptr(),
            stop_key.data_ptr(),
        )
        self._rows[id(rows)] = (rows, packed, longs + ints)
        return packed


def warm_up(dtypes: Iterable[torch.dtype], progress: Progress | None = None) -> None:
    """Compile what weights and caches of these types need, or read it from disk."""
    items = {_ITEMS[_known(dtype)] for dtype in dtypes}
    tables = (linear.LINEAR, rotate.ROTATE, attention.ATTEND)
    kernels = [norm.NORM, *(table[item] for item in sorted(items) for table in tables)]
    for number, kernel in enumerate(kernels):
        if progress is not None:
            progress(kernel.name, number, len(kernels))
        assert kernel.address
    if progress is not None:
        progress("done", len(kernels), len(kernels))


def _known(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _ITEMS:
        known = ", ".join(str(each).removeprefix("torch.") for each in _ITEMS)
        raise ConfigError(f"{str(dtype).removeprefix('torch.')} does not run on a CPU; choose one of {known}")
    return dtype


def _rows_of(x: Tensor) -> Tensor:
    """Float32 rows whose elements lie side by side."""
    if x.dtype != torch.float32:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()


def _maybe_wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _wide(tensor)


def _prepared(linear: Linear) -> Linear:
    return Linear(weight=_stored(linear.weight), bias=_maybe_wide(linear.bias))


def _stored(weight: Tensor) -> Tensor:
    _known(weight.dtype)
    return weight if weight.stride(-1) == 1 else weight.contiguous()


def _prepared_layer(layer: LayerParameters) -> LayerParameters:
    mlp: DenseMLP | ExpertsMLP
    if isinstance(layer.mlp, DenseMLP):
        mlp = DenseMLP(gate_up=_prepared(layer.mlp.gate_up), down=_prepared(layer.mlp.down))
    else:
        mlp = ExpertsMLP(
            router=_prepared(layer.mlp.router),
            gate_up=_stored(layer.mlp.gate_up),
            down=_stored(layer.mlp.down),
            gate_up_bias=_maybe_wide(layer.mlp.gate_up_bias),
            down_bias=_maybe_wide(layer.mlp.down_bias),
        )
    return replace(
        layer,
        input_norm=_wide(layer.input_norm),
        qkv=_prepared(layer.qkv),
        out=_prepared(layer.out),
        mlp_norm=_wide(layer.mlp_norm),
        mlp=mlp,
        q_norm=_maybe_wide(layer.q_norm),
        k_norm=_maybe_wide(layer.k_norm),
        attention_post_norm=_maybe_wide(layer.attention_post_norm),
        mlp_post_norm=_maybe_wide(layer.mlp_post_norm),
        sinks=_maybe_wide(layer.sinks),
    )
