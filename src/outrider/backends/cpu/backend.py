"""The CPU backend: a row's result is the same to the last bit in any batch."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from outrider.backends import Progress, host_memory
from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.base import Argmax, Backend, Body, Capability, EagerPass, Options, Pass, Result
from outrider.backends.batch import BatchBuilder, BlockTableArrays
from outrider.backends.cpu.memory import ScratchBuffer, zeros
from outrider.backends.cpu.packed import PackedMatrix, Packing
from outrider.backends.cpu.packing import CPUWeightForms, Packer
from outrider.backends.cpu.weights import CPUAttentionLayer, prepared, wide
from outrider.backends.drawing import DrawSettings
from outrider.backends.reference.backend import route
from outrider.backends.registry import BackendSettings
from outrider.backends.torch_threads import torch_threads
from outrider.kv.layout import KVLayout
from outrider.models.parameters import DecoderParameters, ExpertsMLP, Linear, Matrix, plain
from outrider.models.spec import Activation, ExpertsSpec
from outrider.models.weight_forms import WeightForms

try:
    from outrider.backends.cpu.batches import CPUBatchBuilder
    from outrider.backends.cpu.kernels import (
        activations,
        argmax,
        attention,
        coarse,
        gather,
        linear,
        narrow,
        norm,
        rotate,
    )
    from outrider.backends.cpu.kernels.batch_rows import WRITE_ROWS
    from outrider.backends.cpu.kernels.compiling import Kernel, load_entry
    from outrider.backends.cpu.kernels.pool import ENTER, RUN_ATTEND, RUN_LINEAR, RUN_NORM, RUN_PLAIN, RUN_STORE
    from outrider.backends.cpu.kernels.threads import Threads, available_cores, shared_threads
    from outrider.backends.cpu.kernels.vector import FAST_HERE
    from outrider.backends.cpu.loading import ACTIVATIONS, ITEMS, ignore_progress, item_of, warm_up
    from outrider.backends.cpu.passes import RecordedPass, Step
    from outrider.backends.cpu.program import (
        CPUArgmax,
        GroupWords,
        Job,
        Program,
        RecordedArgmax,
        SharedBuffers,
        check_token_ids,
    )
    from outrider.backends.cpu.replays import Replays
except ImportError as error:
    _import_error: str | None = str(error)
else:
    _import_error = None

_HEADER = struct.Struct("4q")
_WORD = struct.Struct("q")
_GATHER = struct.Struct("6qf4x")
_NORM = struct.Struct("5qf4x7q")
_LINEAR = struct.Struct("14q")
_ARGMAX = struct.Struct("5q")
_PLACE = struct.Struct("19q")  # from METADATA to PARTS
_GROUPS_MAX = 8


class CPUBackend(Backend):
    """Calls kernels that Numba compiles. Activations are float32 whatever the type of the weights. An instance is not
    for concurrent use by several threads."""

    name = "cpu"
    capabilities = frozenset(Capability)
    device = torch.device("cpu")
    row_exact = True
    compacts = True

    def __init__(self, threads: int | None = None, progress: Progress | None = None) -> None:
        for entry in (ENTER, WRITE_ROWS):
            load_entry(entry, progress or ignore_progress)
        self._progress = progress
        self._threads: Threads = shared_threads(available_cores() if threads is None else threads)
        self._job, self._norm_job = Job(), Job()
        self._program: Program[Any] | None = None
        """The program that is being recorded; None while calls are executed."""
        self.replays = Replays(self._threads)
        self._packer = Packer()
        self._scratch, self._normed, self._narrowed, self._queries, self._plan, self._parts = (
            ScratchBuffer() for _ in range(6)
        )
        self._groups: list[tuple[AttentionMetadata, GroupWords]] = []
        """The words of the latest batches that ran unrecorded. All layers of a group share them."""

    # ---- weights -----------------------------------------------------------------------------------

    def weight_forms(self, dtype: torch.dtype, *, expand: bool = False) -> WeightForms:
        # Kernels convert stored weights to float32, so a model of another dtype gets weights of that dtype.
        return CPUWeightForms(packed=dtype == torch.float32 and not expand)

    def prepare(self, parameters: DecoderParameters) -> DecoderParameters:
        """Keeps matrices as they are stored, and converts norms, biases and sinks to float32."""
        weights = (parameters.head.weight, parameters.layers[0].qkv.weight)
        kinds = [weight.packing if isinstance(weight, PackedMatrix) else weight.dtype for weight in weights]
        warm_up(kinds, self._progress)
        return prepared(parameters)

    def prepare_attention(self, layer: AttentionLayer) -> AttentionLayer:
        return CPUAttentionLayer.of(layer)

    def compact(self, matrix: Matrix) -> Matrix:
        compacted = self._packer.compact(matrix)
        if isinstance(compacted, PackedMatrix):
            warm_up([compacted.packing], self._progress)
        return compacted

    def coarsen(self, matrix: Matrix) -> Matrix:
        return self._packer.coarsen(matrix)

    def keep(self, matrix: Matrix) -> Matrix:
        return self._packer.keep(matrix) if isinstance(matrix, PackedMatrix) else matrix

    # ---- layer arithmetic --------------------------------------------------------------------------

    def embed(self, token_ids: Tensor, embedding: Matrix, scale: float) -> Tensor:
        count, (limit, k) = token_ids.shape[0], embedding.shape
        if self._program is None:
            check_token_ids(token_ids.tolist(), limit)
            token_ids = token_ids.to(torch.int64).contiguous()
        else:
            self._program.takes_token_ids(limit)
        out, job = self._empty(count, k), self._new_job()
        stored = _rows_stored(embedding)
        chunks = (count + gather.ROWS_PER_CHUNK - 1) // gather.ROWS_PER_CHUNK
        _HEADER.pack_into(job.words, 0, gather.GATHER[item_of(embedding)].address, chunks, 0, 0)
        _GATHER.pack_into(
            job.words,
            8 * gather.NUMBERS,
            token_ids.data_ptr(),
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

    def project(self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return self._linear(x, linear.weight, linear.bias, norm=norm, eps=eps)

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
    ) -> Tensor:
        x = _rows_of(x)
        rows, k = x.shape
        n = weight.shape[0] // (1 if activation is None else 2)
        # The residual is updated in place: nothing else reads it.
        out = self._empty(rows, n) if residual is None else residual
        job, before = self._new_job(), 0
        x_address, x_stride = x.data_ptr(), x.stride(0) * 4
        packed = isinstance(weight, PackedMatrix)
        coarsely = isinstance(weight, PackedMatrix) and weight.packing is Packing.COARSE
        if norm is not None or packed:
            norm_job = self._norm_job if self._program is None else self._program.job()
            before, narrowed, narrowed_stride = norm_job.address, 0, 0
            if norm is not None:
                x_address, x_stride = self._room(self._normed, rows * k * 4), k * 4
            if packed:
                narrowed_stride = coarse.row_bytes(k) if coarsely else k // narrow.BLOCK * narrow.BLOCK_BYTES
                narrowed = self._room(self._narrowed, rows * narrowed_stride)
            self._pack_norm(norm_job, x, norm, eps, x_address, narrowed=(narrowed, narrowed_stride, coarsely))
            if packed:
                x_address, x_stride = narrowed, narrowed_stride
        stored = _rows_stored(weight)
        kernel = linear.LINEAR[item_of(weight)]
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
            0,  # `plan_linear` sets the width of a strip
            out.data_ptr(),
            out.stride(0) * 4,
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0) * 4,
            activations.NONE if activation is None else ACTIVATIONS[activation],
        )
        self._call(RUN_LINEAR, job, before)
        return out

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> Tensor:
        heads, dim, kv_heads = layer.heads, layer.head_dim, layer.kv_heads
        qkv = _rows_of(qkv)
        count = len(qkv)
        out = self._empty(count, heads * dim)
        room = 0
        if count * kv_heads < 8 * self._threads.count and self._threads.count > 1:
            # A recorded pass must have room for any length.
            keys_max = metadata.max_keys if self._program is None else layer.rotary.shape[0]
            room = count * kv_heads * (keys_max // attention.BLOCK + 2)
        parts = self._room(self._parts, room * (heads // kv_heads) * attention.part_bytes(dim))
        job = self._attention_job(qkv, layer, kv, metadata, out=out.data_ptr(), parts=parts)
        self._call(RUN_ATTEND, job, room)
        return out

    def store(self, pairs: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> None:
        job = self._attention_job(_rows_of(pairs), layer, kv, metadata, out=0, parts=0)
        _WORD.pack_into(job.words, 8 * rotate.HEADS, 0)
        self._call(RUN_STORE, job, 0)

    def _attention_job(
        self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata, *, out: int, parts: int
    ) -> Job:
        layer = CPUAttentionLayer.of(layer)
        heads, dim, keys, values = layer.heads, layer.head_dim, kv.keys, kv.values
        assert keys.stride(3) == 1 and values.stride(3) == 1 and keys.dtype == values.dtype
        count, item, size = len(qkv), ITEMS[keys.dtype], keys.element_size()
        job = self._new_job()
        self._pack_header(job, rotate.ROTATE[item], attention.scratch_bytes(heads, layer.kv_heads, dim))
        words = job.words
        words[8 * rotate.HEADS : 8 * rotate.HEADS + len(layer.words)] = layer.words
        if self._program is not None:
            self._program.keep((layer, keys, values))
        key_page, key_head, key_token, _ = keys.stride()
        value_page, value_head, value_token, _ = values.stride()
        _PLACE.pack_into(
            words,
            8 * rotate.METADATA,
            self._group_words(metadata).address,
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

    def _group_words(self, metadata: AttentionMetadata) -> GroupWords:
        if self._program is not None:
            return self._program.group_words(metadata)
        for known_metadata, words in self._groups:
            if known_metadata is metadata:
                return words
        words = GroupWords()
        words.set(metadata)
        self._groups = [*self._groups[1 - _GROUPS_MAX :], (metadata, words)]
        return words

    def copy(self, x: Tensor, out: Tensor) -> None:
        if self._program is None:
            out.copy_(x)
        else:
            self._program.copy(x, out)

    # ---- passes ------------------------------------------------------------------------------------

    def compile_pass(self, body: Body[Options, Result], *, static: bool = True) -> Pass[Options, Result]:
        return RecordedPass(self, body) if static else EagerPass(body)

    def step(self) -> AbstractContextManager[None]:
        return Step(self)

    def exclusive_threads(self) -> AbstractContextManager[None]:
        # PyTorch's threads spin for milliseconds after each parallel call, on the cores that this backend's threads
        # need.
        return torch_threads(1)

    def record(
        self, x: Tensor, groups: tuple[AttentionMetadata, ...], buffers: SharedBuffers, call: Callable[[Tensor], Result]
    ) -> Program[Result]:
        """Records the operations that `call` makes with x."""
        assert self._program is None
        try:
            self._program = program = Program[Result](self._threads.address, x, buffers)
            program.record(groups, call)
        finally:
            self._program = None
        return program

    def settle(self) -> None:
        self.replays.settle()

    def discard(self) -> None:
        """Drops what a failed step has left: enqueued passes, whose pages may belong to another request by now, and a
        recording that was interrupted."""
        self.replays.enqueued = None
        self._program = None

    # ---- batches and sampling ----------------------------------------------------------------------

    def batch_builder(self, layout: KVLayout, tables: BlockTableArrays) -> BatchBuilder:
        return CPUBatchBuilder(layout, tables)

    def argmax(self, logits: Tensor, *, probabilities: bool = False) -> Argmax:
        if self._program is None:
            return CPUArgmax(logits)
        rows, k = logits.shape
        found, job = RecordedArgmax(rows, probabilities=probabilities), self._program.job()
        self._program.keep(found)
        _HEADER.pack_into(job.words, 0, argmax.ARGMAX.address, rows, 0, 0)
        _ARGMAX.pack_into(
            job.words, 8 * argmax.X, logits.data_ptr(), logits.stride(0) * 4, k, found.address, probabilities
        )
        self._call(RUN_PLAIN, job, 0)
        return found

    def draw(self, logits: Tensor, settings: DrawSettings) -> Tensor:
        # Imported on use, because the import compiles it.
        from outrider.backends.cpu.kernels.draw import draw_cpu

        names = ("temperature", "log_min_p", "top_k", "top_p", "key")
        arrays = {name: getattr(settings, name).numpy() for name in names}
        return torch.from_numpy(draw_cpu(logits.numpy(), **arrays))

    # ---- memory ------------------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return zeros(shape, dtype)

    def free_kv_bytes(self, memory_utilization: float) -> int:
        return host_memory.free_kv_bytes()

    def check_kv_bytes(self, kv_bytes: int) -> None:
        host_memory.check_kv_bytes(kv_bytes)

    # ---- the memory of a call: shared by all calls, or a program's own -----------------------------

    def _new_job(self) -> Job:
        return self._job if self._program is None else self._program.job()

    def _empty(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width) if self._program is None else self._program.empty(rows, width)

    def _room(self, buffer: ScratchBuffer, size: int) -> int:
        address = buffer.at_least(size)
        if self._program is not None:
            # The buffer may move when it grows; the program goes on using this memory.
            self._program.keep(buffer.tensor)
        return address

    def _call(self, what: int, job: Job, parameter: int) -> None:
        if self._program is not None:
            self._program.add(what, job.address, parameter)
            return
        self.replays.flush()
        ENTER.call(self._threads.address, job.address, what, parameter)

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
        narrowed: tuple[int, int, bool] = (0, 0, False),
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


def _rows_of(x: Tensor) -> Tensor:
    """Returns float32 rows whose elements are contiguous."""
    if x.dtype != torch.float32:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows_stored(weight: Matrix) -> Tensor:
    return weight.data if isinstance(weight, PackedMatrix) else plain(weight)


def unavailable(settings: BackendSettings) -> str | None:
    """Returns why this backend cannot be used here; None if it can."""
    if settings.device.type != "cpu":
        return f"it needs a CPU, but the device is {settings.device}"
    if _import_error is not None:
        return f"Numba cannot be imported ({_import_error})"
    if sys.platform != "linux":
        return "its threads need a system call that only Linux has"
    return None if FAST_HERE else "the processor lacks AVX2, FMA or F16C"


def build(settings: BackendSettings) -> Backend:
    return CPUBackend(threads=settings.threads, progress=settings.progress)
