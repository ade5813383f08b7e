"""The reference backend: plain PyTorch versions of all operations, for any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.backends import host_memory
from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.base import Argmax, Backend, Capability
from outrider.backends.drawing import DrawSettings
from outrider.backends.reference.draw import draw
from outrider.backends.registry import BackendSettings
from outrider.models.parameters import DecoderParameters, ExpertsMLP, Linear, Matrix, plain, written_out
from outrider.models.spec import Activation, ExpertsSpec


class ReferenceBackend(Backend):
    """Plain PyTorch operations, on any device that PyTorch has."""

    name = "reference"
    capabilities = frozenset(Capability)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.default_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def prepare(self, parameters: DecoderParameters) -> DecoderParameters:
        return written_out(parameters)

    def embed(self, token_ids: Tensor, embedding: Matrix, scale: float) -> Tensor:
        x = functional.embedding(token_ids, plain(embedding))
        # Models multiply by a scale rounded to their own dtype.
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype, device=x.device)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight.dtype != x.dtype:
            # A float32 weight is multiplied before rounding.
            return (weight * wide).to(x.dtype)
        return weight * wide.to(x.dtype)

    def project(self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        if norm is not None:
            x = self.norm(x, norm, eps)
        return functional.linear(x, plain(linear.weight), linear.bias)

    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, *, post_norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        y = functional.linear(x, plain(linear.weight), linear.bias)
        return residual + (y if post_norm is None else self.norm(y, post_norm, eps))

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation, *, norm: Tensor, eps: float) -> Tensor:
        gate, up = self.project(x, gate_up, norm=norm, eps=eps).chunk(2, dim=-1)
        return activate(gate, up, activation)

    def experts(
        self, x: Tensor, mlp: ExpertsMLP, experts: ExpertsSpec, activation: Activation, *, norm: Tensor, eps: float
    ) -> Tensor:
        x = self.norm(x, norm, eps)
        weights, chosen = route(functional.linear(x, plain(mlp.router.weight), mlp.router.bias), experts)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            row, place = (chosen == expert).nonzero(as_tuple=True)
            gate_up_bias = None if mlp.gate_up_bias is None else mlp.gate_up_bias[expert]
            down_bias = None if mlp.down_bias is None else mlp.down_bias[expert]
            gate, up = functional.linear(x[row], mlp.gate_up[expert], gate_up_bias).chunk(2, dim=-1)
            y = functional.linear(activate(gate, up, activation), mlp.down[expert], down_bias)
            out.index_add_(0, row, y * weights[row, place, None].to(y.dtype))
        return out

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self._split(qkv, layer)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(q, layer.q_norm, layer.norm_eps), self.norm(k, layer.k_norm, layer.norm_eps)
        table = layer.rotary[metadata.positions]
        q, k = rotate(q, table), rotate(k, table)
        self._write(k, v, kv, metadata)
        return self._attend_pages(q, layer, kv, metadata).flatten(1)

    def store(self, pairs: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> None:
        k, v = pairs.unflatten(-1, (2, layer.kv_heads, layer.head_dim)).unbind(1)
        if layer.k_norm is not None:
            k = self.norm(k, layer.k_norm, layer.norm_eps)
        self._write(rotate(k, layer.rotary[metadata.positions]), v, kv, metadata)

    @staticmethod
    def _write(k: Tensor, v: Tensor, kv: PagedKV, metadata: AttentionMetadata) -> None:
        page, offset = metadata.slot_mapping // kv.page_tokens, metadata.slot_mapping % kv.page_tokens
        kv.keys[page, :, offset] = k.to(kv.keys.dtype)
        kv.values[page, :, offset] = v.to(kv.values.dtype)

    @staticmethod
    def _split(qkv: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        return q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, dim))

    @staticmethod
    def _attend_pages(q: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> Tensor:
        """Gathers the keys of each row into one tensor, which takes much memory on long contexts."""
        offsets = torch.arange(max(1, metadata.max_keys), device=q.device)
        at = metadata.first_key[:, None] + offsets  # [rows, keys] positions
        real = at < metadata.stop_key[:, None]
        at = torch.where(real, at, metadata.first_key[:, None])
        number = (at // kv.page_tokens).clamp(max=metadata.block_tables.shape[1] - 1)
        page = metadata.block_tables[metadata.table_rows[:, None], number].long()
        slot = at % kv.page_tokens
        keys, values = kv.keys[page, :, slot], kv.values[page, :, slot]  # [rows, keys, kv_heads, dim]
        heads_per_kv = layer.heads // layer.kv_heads
        grouped = q.unflatten(1, (layer.kv_heads, heads_per_kv))
        scores = torch.einsum("rgsd,rkgd->rgsk", grouped, keys.to(q.dtype)).float() * layer.scale
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores = scores.masked_fill(~real[:, None, None, :], float("-inf"))
        if layer.sinks is not None:
            sink = layer.sinks.float().view(1, layer.kv_heads, heads_per_kv, 1).expand(scores.shape[0], -1, -1, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]].to(q.dtype)
        return torch.einsum("rgsk,rkgd->rgsd", weights, values.to(q.dtype)).flatten(1, 2)

    def argmax(self, logits: Tensor, *, probabilities: bool = False) -> Argmax:
        return TorchArgmax(logits)

    def draw(self, logits: Tensor, settings: DrawSettings) -> Tensor:
        return draw(logits, settings)

    def free_kv_bytes(self, memory_utilization: float) -> int:
        return host_memory.free_kv_bytes()

    def check_kv_bytes(self, kv_bytes: int) -> None:
        host_memory.check_kv_bytes(kv_bytes)


class TorchArgmax(Argmax):
    """The argmax of logits that are in memory, computed when it is read."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def read(self) -> tuple[list[int], list[float]]:
        logits = self._logits
        if logits.device.type == "cpu":
            # NumPy's argmax is ten times as fast as PyTorch's.
            array = logits.numpy()
            best = array.argmax(axis=-1)
            return (ids := best.tolist()), [float(row[token]) for row, token in zip(array, ids, strict=True)]
        ids = logits.argmax(dim=-1, keepdim=True)
        # Ids and logits go into one tensor, so that the host waits for the device once.
        pairs = torch.cat([ids.to(torch.float64), logits.gather(-1, ids).to(torch.float64)], dim=-1).tolist()
        return [int(token) for token, _ in pairs], [value for _, value in pairs]

    def probabilities(self) -> list[float]:
        found: list[float] = self._logits.softmax(dim=-1).amax(dim=-1).tolist()
        return found


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the two halves of each head's leading elements against each other. x: [rows, heads, dim]."""
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.SILU:
        return functional.silu(gate) * up
    if activation is Activation.GELU_TANH:
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def route(logits: Tensor, experts: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Returns the weights and the indices of the experts chosen for each row."""
    if not experts.softmax_first:
        chosen_logits, chosen = logits.float().topk(experts.per_token, dim=-1)
        return torch.softmax(chosen_logits, dim=-1), chosen
    weights, chosen = torch.softmax(logits.float(), dim=-1).topk(experts.per_token, dim=-1)
    if experts.normalise_chosen:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def unavailable(settings: BackendSettings) -> str | None:
    return None


def build(settings: BackendSettings) -> Backend:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return ReferenceBackend(settings.device)
