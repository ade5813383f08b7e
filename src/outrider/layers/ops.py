"""The operations a decoder is made of, and their plain PyTorch version.

`TorchOps` is the reference: it runs on any device, and every faster version is tested against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from outrider.layers.attention import AttentionLayer, AttentionRows, PagedKV
from outrider.models.parameters import DecoderParameters, ExpertsMLP, Linear, Matrix, plain, written_out
from outrider.models.spec import Activation, ExpertsSpec

Result = TypeVar("Result")


class Ability(Enum):
    """What a version's attention can do; a decoder or drafter that needs more is refused at the start."""

    CAUSAL = "causal"
    NON_CAUSAL = "non-causal"
    WINDOW = "window"
    SINKS = "sinks"
    SOFTCAP = "softcap"


class Greatest(ABC):
    """Where each row's largest number is; known when the pass has run that asks for it."""

    @abstractmethod
    def read(self) -> tuple[list[int], list[float]]:
        """The lowest place of each row's largest number, and that number; NaN is larger than any number."""

    @abstractmethod
    def shares(self) -> list[float] | None:
        """The share of that number in a softmax of its row, if that was asked for."""


class Recorded(ABC, Generic[Result]):
    """Operations that were recorded, to be run again on other values."""

    @abstractmethod
    def run(self, x: Tensor, rows: Sequence[AttentionRows], *, after: Ready | None = None) -> Result:
        """For an x of the recorded shape, and rows in the recorded order. The next run writes over the results.
        `after`: what has to run first, in the same call."""


class Ready(NamedTuple):
    """Operations that were recorded, and what to run them on. The values may not change until they have run."""

    recorded: Recorded[Any]
    x: Tensor
    rows: Sequence[AttentionRows]

    def run(self) -> None:
        self.recorded.run(self.x, self.rows)


class Ops(ABC):
    """Rows in, rows out; a row's result must not depend on the other rows of the batch beyond rounding."""

    name: str
    row_exact: bool = False
    """A row's result is the same to the last bit whatever else is in the batch."""
    reads_stored: bool = False
    """Products take matrices as files store them, packed or of 16 bits, and compute in float32."""
    own_threads: bool = False
    """Threads of its own do the work. PyTorch's would watch for more work on the same cores, for milliseconds after
    each call that is large enough to be shared out, and these wait for them."""
    abilities: frozenset[Ability] = frozenset(Ability)

    def prepare(self, parameters: DecoderParameters) -> DecoderParameters:
        """Bring the tensors into the form this version likes best. Called once."""
        return parameters

    @abstractmethod
    def embed(self, tokens: Tensor, embedding: Matrix, scale: float) -> Tensor:
        """[rows, hidden]"""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of each row."""

    @abstractmethod
    def project(
        self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + b, of normed rows where a norm is given; in the memory of `out` where that is given."""

    @abstractmethod
    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, *, post_norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        """residual + (x Wᵀ + b), normed before it is added where a norm is given. May reuse the residual's memory."""

    @abstractmethod
    def gated(self, x: Tensor, gate_up: Linear, activation: Activation, *, norm: Tensor, eps: float) -> Tensor:
        """act(gate) * up of normed rows: [rows, intermediate]."""

    @abstractmethod
    def experts(
        self, x: Tensor, mlp: ExpertsMLP, experts: ExpertsSpec, activation: Activation, *, norm: Tensor, eps: float
    ) -> Tensor:
        """The weighted sum of each row's chosen experts: [rows, hidden]."""

    @abstractmethod
    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their slots, attend: [rows, heads * head_dim]."""

    def copy(self, x: Tensor, out: Tensor) -> None:
        """What x is now, to columns of a wider tensor."""
        out.copy_(x)

    def greatest(self, x: Tensor, *, shares: bool = False) -> Greatest | None:
        """Of rows that were just made, where that is quicker than looking afterwards; None: look."""
        return None

    def record(
        self, x: Tensor, rows: Sequence[AttentionRows], body: Callable[[Tensor], Result]
    ) -> Recorded[Result] | None:
        """Write down what `body` does with x, for versions where calling costs more than computing; None: call it.

        `body` only calls these operations, with arguments that depend on nothing but shapes; it keeps no views. x may
        also be token ids, which `body` embeds. It is read where it lies, so `body` does not write over it.
        """
        return None

    def store(self, pairs: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> None:
        """Norm and rotate keys, write keys and values to their slots; nobody reads.

        `pairs`: [rows, 2 * kv_heads * head_dim], all keys and then all values."""
        k, v = pairs.unflatten(-1, (2, layer.kv_heads, layer.head_dim)).unbind(1)
        if layer.k_norm is not None:
            k = self.norm(k.flatten(0, 1), layer.k_norm, layer.norm_eps).view(k.shape)
        k = rotate(k, layer.rotary[rows.positions])
        page, offset = rows.slots // kv.page_tokens, rows.slots % kv.page_tokens
        kv.keys[page, :, offset] = k.to(kv.keys.dtype)
        kv.values[page, :, offset] = v.to(kv.values.dtype)


class TorchOps(Ops):
    name = "torch"

    def prepare(self, parameters: DecoderParameters) -> DecoderParameters:
        return written_out(parameters)

    def embed(self, tokens: Tensor, embedding: Matrix, scale: float) -> Tensor:
        x = functional.embedding(tokens, plain(embedding))
        # Models multiply by a scale rounded to their own dtype.
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype, device=x.device)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight.dtype != x.dtype:
            # A weight kept wide is multiplied before rounding.
            return (weight * wide).to(x.dtype)
        return weight * wide.to(x.dtype)

    def project(
        self, x: Tensor, linear: Linear, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        if norm is not None:
            x = self.norm(x, norm, eps)
        y = functional.linear(x, plain(linear.weight), linear.bias)
        return y if out is None else out.copy_(y)

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

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> Tensor:
        q, k, v = self._split(qkv, layer)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(q, layer.q_norm, layer.norm_eps), self.norm(k, layer.k_norm, layer.norm_eps)
        table = layer.rotary[rows.positions]
        q, k = rotate(q, table), rotate(k, table)
        page, offset = rows.slots // kv.page_tokens, rows.slots % kv.page_tokens
        kv.keys[page, :, offset] = k.to(kv.keys.dtype)
        kv.values[page, :, offset] = v.to(kv.values.dtype)
        return self._attend_pages(q, layer, kv, rows).flatten(1)

    @staticmethod
    def _split(qkv: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        return q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, dim))

    @staticmethod
    def _attend_pages(q: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> Tensor:
        """Gathers each row's keys side by side: plain, and memory-hungry on long contexts."""
        offsets = torch.arange(max(1, rows.most_keys), device=q.device)
        at = rows.first_key[:, None] + offsets  # [rows, keys] positions
        real = at < rows.stop_key[:, None]
        at = torch.where(real, at, rows.first_key[:, None])
        number = (at // kv.page_tokens).clamp(max=rows.tables.shape[1] - 1)
        page = rows.tables[rows.sequence[:, None], number].long()
        slot = at % kv.page_tokens
        keys, values = kv.keys[page, :, slot], kv.values[page, :, slot]  # [rows, keys, kv_heads, dim]
        share = layer.heads // layer.kv_heads
        grouped = q.unflatten(1, (layer.kv_heads, share))
        scores = torch.einsum("rgsd,rkgd->rgsk", grouped, keys.to(q.dtype)).float() * layer.scale
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores = scores.masked_fill(~real[:, None, None, :], float("-inf"))
        if layer.sinks is not None:
            sink = layer.sinks.float().view(1, layer.kv_heads, share, 1).expand(scores.shape[0], -1, -1, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]].to(q.dtype)
        return torch.einsum("rgsk,rkgd->rgsd", weights, values.to(q.dtype)).flatten(1, 2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the two halves of each head's leading elements against each other. x: [rows, heads, dim]."""
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
    """The weights and the numbers of the experts chosen for each row."""
    if not experts.softmax_first:
        chosen_logits, chosen = logits.float().topk(experts.per_token, dim=-1)
        return torch.softmax(chosen_logits, dim=-1), chosen
    weights, chosen = torch.softmax(logits.float(), dim=-1).topk(experts.per_token, dim=-1)
    if experts.normalise_chosen:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen
