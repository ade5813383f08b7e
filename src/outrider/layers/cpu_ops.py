"""Operations on a CPU, by compiled kernels: a row's result is the same to the last bit in any batch."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.kernels import Progress
from outrider.layers.attention import AttentionLayer, AttentionRows, PagedKV
from outrider.layers.cpu_weights import known, prepared, wide
from outrider.layers.ops import Greatest, Ops, Recorded, Result, route
from outrider.models.packed import PackedMatrix, Packing
from outrider.models.parameters import DecoderParameters, ExpertsMLP, Linear, Matrix
from outrider.models.spec import Activation, ExpertsSpec

try:
    from outrider.kernels import activations, attention, gather, greatest, linear, narrow, norm, rotate
    from outrider.kernels.compiling import Kernel, load_all, load_entry
    from outrider.kernels.pool import ENTER, RUN_ATTEND, RUN_LINEAR, RUN_NORM, RUN_PLAIN, RUN_STORE
    from outrider.kernels.threads import Threads, available_cores, shared_threads
    from outrider.kernels.vector import BFLOAT16, EIGHT_BITS, FAST_HERE, FLOAT16, FLOAT32, FOUR_BITS
    from outrider.layers.cpu_program import Found, Job, Program, Step, check_numbers
except ImportError as error:
    _import_error: str | None = str(error)
else:
    _import_error = None
    _ITEMS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
    _PACKINGS = {Packing.FOUR_BITS: FOUR_BITS, Packing.EIGHT_BITS: EIGHT_BITS}
    _ACTIVATIONS = {
        Activation.SILU: activations.SILU,
        Activation.GELU_TANH: activations.GELU_TANH,
        Activation.CLAMPED_SWIGLU: activations.CLAMPED_SWIGLU,
    }

_HEADER = struct.Struct("4q")
_WORD = struct.Struct("q")
_GATHER = struct.Struct("6qf4x")
_NORM = struct.Struct("5qf4x6q")
_LINEAR = struct.Struct("14q")
_GREATEST = struct.Struct("5q")
_LAYER = struct.Struct("3qf4x4qf4xf4xq")
_PLACE = struct.Struct("19q")  # from STEP to PARTS
_STEPS_CACHED_MAX = 8
_LAYERS_CACHED_MAX = 1024


class _Buffer:
    """Scratch memory that grows to what was last asked for."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._size, self._address = 0, 0

    def at_least(self, size: int) -> int:
        """Its address."""
        if self._size < size:
            # None in between: an interrupt may come at any line, and what lay at the old address is gone.
            self._size = 0
            self.tensor = torch.empty(size, dtype=torch.uint8)
            self._address = self.tensor.data_ptr()
            self._size = size
        return self._address


class NumbaOps(Ops):
    """One caller at a time. Activations are float32 whatever the weights are stored as."""

    name = "numba"
    row_exact = True
    reads_stored = True
    own_threads = True

    def __init__(self, threads: int | None = None, progress: Progress | None = None) -> None:
        load_entry(ENTER, progress or _unheard)
        self._progress = progress
        self._threads: Threads = shared_threads(available_cores() if threads is None else threads)
        self._job, self._norm_job = Job(), Job()
        self._program: Program[Any] | None = None
        """What is being recorded."""
        self._scratch, self._normed, self._narrowed, self._queries, self._plan, self._parts = (
            _Buffer() for _ in range(6)
        )
        self._layers: dict[int, tuple[AttentionLayer, bytes, list[Tensor]]] = {}
        self._steps: dict[int, tuple[AttentionRows, Step]] = {}

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
        weights = (parameters.head.weight, parameters.layers[0].qkv.weight)
        kinds = [weight.packing if isinstance(weight, PackedMatrix) else weight.dtype for weight in weights]
        warm_up(kinds, self._progress)
        return prepared(parameters)

    def embed(self, tokens: Tensor, embedding: Matrix, scale: float) -> Tensor:
        count, (end, k) = tokens.shape[0], embedding.shape
        if self._program is None:
            check_numbers(tokens.tolist(), end)
            tokens = tokens.to(torch.int64).contiguous()
        else:
            self._program.numbers(end)
        out, job = self._empty(count, k), self._new_job()
        stored = _rows_stored(embedding)
        chunks = (count + gather.ROWS_PER_CHUNK - 1) // gather.ROWS_PER_CHUNK
        _HEADER.pack_into(job.words, 0, gather.GATHER[_item_of(embedding)].address, chunks, 0, 0)
        _GATHER.pack_into(
            job.words,
            8 * gather.NUMBERS,
            tokens.data_ptr(),
            count,
            stored.data_ptr(),
            stored.stride(0) * stored.element_size(),
            k,
            out.data_ptr(),
            scale,
        )
        self._call(RUN_PLAIN, job, 0)
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _rows_of(x), wide(weight)
        out = self._empty(*x.shape)
        job = self._new_job()
        self._pack_norm(job, x, weight, eps, out.data_ptr())
        self._call(RUN_NORM, job, 0)
        return out

    def project(
        self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        return self._linear(x, linear.weight, linear.bias, norm=norm, eps=eps, out=out)

    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, *, post_norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        residual = _rows_of(residual)
        if post_norm is None:
            return self._linear(x, linear.weight, linear.bias, residual=residual)
        y = self._linear(x, linear.weight, linear.bias)
        job = self._new_job()
        self._pack_norm(job, y, wide(post_norm), eps, y.data_ptr(), residual=residual)
        self._call(RUN_NORM, job, 0)
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
        weight: Matrix,
        bias: Tensor | None,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        activation: Activation | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        x = _rows_of(x)
        rows, k = x.shape
        n = weight.shape[0] // (1 if activation is None else 2)
        if out is None:
            # A residual is updated in place: the row is read by nobody else.
            out = self._empty(rows, n) if residual is None else residual
        job, before = self._new_job(), 0
        x_address, x_stride = x.data_ptr(), x.stride(0) * 4
        packed = isinstance(weight, PackedMatrix)
        if norm is not None or packed:
            norm_job = self._norm_job if self._program is None else self._program.job()
            before, narrowed, narrowed_stride = norm_job.address, 0, 0
            if norm is not None:
                x_address, x_stride = self._room(self._normed, rows * k * 4), k * 4
            if packed:
                narrowed_stride = k // narrow.BLOCK * narrow.BLOCK_BYTES
                narrowed = self._room(self._narrowed, rows * narrowed_stride)
            self._pack_norm(norm_job, x, norm, eps, x_address, narrowed=(narrowed, narrowed_stride))
            if packed:
                x_address, x_stride = narrowed, narrowed_stride
        stored = _rows_stored(weight)
        kernel = linear.LINEAR[_item_of(weight)]
        self._pack_header(job, kernel, linear.scratch_bytes(k))
        _LINEAR.pack_into(
            job.words,
            8 * linear.X,
            x_address,
            x_stride,
            rows,
            stored.data_ptr(),
            stored.stride(0) * stored.element_size(),
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
        self._call(RUN_LINEAR, job, before)
        return out

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> Tensor:
        heads, dim, kv_heads = layer.heads, layer.head_dim, layer.kv_heads
        qkv = _rows_of(qkv)
        count = len(qkv)
        out = self._empty(count, heads * dim)
        room = 0
        if count * kv_heads < 8 * self._threads.count and self._threads.count > 1:
            # What is recorded has to do for any length.
            keys_max = rows.most_keys if self._program is None else layer.rotary.shape[0]
            room = count * kv_heads * (keys_max // attention.BLOCK + 2)
        parts = self._room(self._parts, room * (heads // kv_heads) * attention.part_bytes(dim))
        job = self._attention_job(qkv, layer, kv, rows, out=out.data_ptr(), parts=parts)
        self._call(RUN_ATTEND, job, room)
        return out

    def store(self, pairs: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> None:
        job = self._attention_job(_rows_of(pairs), layer, kv, rows, out=0, parts=0)
        _WORD.pack_into(job.words, 8 * rotate.HEADS, 0)
        self._call(RUN_STORE, job, 0)

    def _attention_job(
        self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows, *, out: int, parts: int
    ) -> Job:
        heads, dim, keys, values = layer.heads, layer.head_dim, kv.keys, kv.values
        assert keys.stride(3) == 1 and values.stride(3) == 1 and keys.dtype == values.dtype
        count, item, size = len(qkv), _ITEMS[keys.dtype], keys.element_size()
        job = self._new_job()
        self._pack_header(job, rotate.ROTATE[item], attention.scratch_bytes(heads, layer.kv_heads, dim))
        words = job.words
        words[8 * rotate.HEADS : 8 * rotate.HEADS + _LAYER.size] = self._layer_words(layer)
        if self._program is not None:
            self._program.keep((self._layers[id(layer)], keys, values))
        key_page, key_head, key_token, _ = keys.stride()
        value_page, value_head, value_token, _ = values.stride()
        _PLACE.pack_into(
            words,
            8 * rotate.STEP,
            self._step(rows).address,
            qkv.data_ptr(),
            qkv.stride(0) * 4,
            self._room(self._queries, count * heads * dim * 4),
            out,
            heads * dim * 4,
            rotate.ROTATE[item].address,
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
            self._room(self._plan, count * 16),
            parts,
        )
        return job

    def copy(self, x: Tensor, out: Tensor) -> None:
        if self._program is None:
            out.copy_(x)
        else:
            self._program.copy(x, out)

    def greatest(self, x: Tensor, *, shares: bool = False) -> Greatest | None:
        """Only where it saves a call into NumPy, which takes longer than the search when caches are cold."""
        if self._program is None:
            return None
        rows, k = x.shape
        found, job = Found(rows, shares=shares), self._program.job()
        self._program.keep(found)
        _HEADER.pack_into(job.words, 0, greatest.GREATEST.address, rows, 0, 0)
        _GREATEST.pack_into(job.words, 8 * greatest.X, x.data_ptr(), x.stride(0) * 4, k, found.address, shares)
        self._call(RUN_PLAIN, job, 0)
        return found

    def record(
        self, x: Tensor, rows: Sequence[AttentionRows], body: Callable[[Tensor], Result]
    ) -> Recorded[Result] | None:
        assert self._program is None
        self._program = program = Program[Result](self._threads.address, x)
        try:
            program.record(rows, body)
        finally:
            self._program = None
        return program

    # --- the memory of a call: shared by all calls, or a program's own ------------------------------

    def _new_job(self) -> Job:
        return self._job if self._program is None else self._program.job()

    def _empty(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width) if self._program is None else self._program.empty(rows, width)

    def _room(self, buffer: _Buffer, size: int) -> int:
        address = buffer.at_least(size)
        if self._program is not None:
            # The buffer may grow, and then lies elsewhere.
            self._program.keep(buffer.tensor)
        return address

    def _call(self, what: int, job: Job, parameter: int) -> None:
        if self._program is None:
            ENTER.call(self._threads.address, job.address, what, parameter)
        else:
            self._program.add(what, job.address, parameter)

    def _pack_header(self, job: Job, kernel: Kernel, scratch_bytes: int) -> None:
        scratch_bytes = (scratch_bytes + 63) // 64 * 64
        scratch = self._room(self._scratch, scratch_bytes * self._threads.count)
        _HEADER.pack_into(job.words, 0, kernel.address, 0, scratch, scratch_bytes)

    def _pack_norm(
        self,
        job: Job,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        out: int,
        *,
        residual: Tensor | None = None,
        narrowed: tuple[int, int] = (0, 0),
    ) -> None:
        rows, k = x.shape
        if self._program is not None and weight is not None:
            self._program.keep(weight)
        _HEADER.pack_into(job.words, 0, norm.NORM.address, 0, 0, 0)
        _NORM.pack_into(
            job.words,
            8 * norm.X,
            x.data_ptr(),
            x.stride(0) * 4,
            rows,
            k,
            0 if weight is None else weight.data_ptr(),
            eps,
            out,
            k * 4,
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0) * 4,
            *narrowed,
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
                kept.append(wide(tensor))
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

    def _step(self, rows: AttentionRows) -> Step:
        if self._program is not None:
            return self._program.step(rows)
        known = self._steps.get(id(rows))
        if known is not None and known[1].holds(rows):
            return known[1]
        if len(self._steps) >= _STEPS_CACHED_MAX:
            self._steps.clear()
        step = Step()
        step.set(rows)
        self._steps[id(rows)] = (rows, step)
        return step


def warm_up(kinds: Iterable[torch.dtype | Packing], progress: Progress | None = None) -> None:
    """Compile what weights of these kinds and their caches need, or read it from disk."""
    kinds = set(kinds)
    packed = {kind for kind in kinds if isinstance(kind, Packing)}
    items = {_ITEMS[known(kind)] for kind in kinds if isinstance(kind, torch.dtype)}
    # Whoever keeps weights packed computes and caches in float32.
    caches = items | ({FLOAT32} if packed else set())
    kernels = [norm.NORM, greatest.GREATEST]
    stored = sorted(items | {_PACKINGS[kind] for kind in packed})
    kernels += [table[item] for table in (linear.LINEAR, gather.GATHER) for item in stored]
    kernels += [table[item] for item in sorted(caches) for table in (rotate.ROTATE, attention.ATTEND)]
    load_all(kernels, progress or _unheard)


def _unheard(_what: str, _done: int, _total: int) -> None:
    """Nobody waits for a report."""


def _item_of(weight: Matrix) -> int:
    return _PACKINGS[weight.packing] if isinstance(weight, PackedMatrix) else _ITEMS[known(weight.dtype)]


def _rows_of(x: Tensor) -> Tensor:
    """Float32 rows whose elements lie side by side."""
    if x.dtype != torch.float32:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows_stored(weight: Matrix) -> Tensor:
    return weight.data if isinstance(weight, PackedMatrix) else weight
