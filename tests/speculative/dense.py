"""Plain PyTorch, straight from the papers: whole sequences, dense masks, no cache, nothing of the engine's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.load import LoadedModel
from outrider.models.parameters import DenseMLP

Tensors = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [rows, heads, dim]; the first half of a head is the real part, the second the imaginary one."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    y = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([y.real, y.imag], dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q: [queries, heads, dim], k and v: [keys, kv heads, dim], visible: bool [queries, keys]."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def target_layers(model: LoadedModel, tokens: Sequence[int]) -> list[Tensor]:
    """What leaves each layer of the target, for all tokens."""
    spec, parameters = model.spec, model.parameters
    positions = torch.arange(len(tokens))
    behind = positions[:, None] - positions
    x = parameters.embedding[torch.tensor(list(tokens))]
    leaving = []
    for layer, weights in zip(spec.layers, parameters.layers, strict=True):
        h = rms_norm(x, weights.input_norm, spec.norm_eps)
        q, k, v = (h @ weights.qkv.weight.T).split([spec.query_size, spec.kv_size, spec.kv_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in (q, k, v))
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, spec.norm_eps), rms_norm(k, weights.k_norm, spec.norm_eps)
        q, k = rotated(q, positions, layer.rope.theta), rotated(k, positions, layer.rope.theta)
        visible = (behind >= 0) & (behind < (layer.window or len(tokens)))
        x = x + attention(q, k, v, visible) @ weights.out.weight.T
        mlp = weights.mlp
        assert isinstance(mlp, DenseMLP)
        gate, up = mlp.gate_up.weight.chunk(2)
        x = x + gated(rms_norm(x, weights.mlp_norm, spec.norm_eps), gate, up, mlp.down.weight)
        leaving.append(x)
    return leaving


class DenseLayer:
    """One decoder layer of a drafter, from tensors under their Hugging Face names."""

    def __init__(self, tensors: Tensors, prefix: str, *, head_dim: int, theta: float = 10_000.0, eps: float = 1e-6):
        self.tensors, self.prefix = tensors, prefix
        self.head_dim, self.theta, self.eps = head_dim, theta, eps

    def get(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}.{name}.weight"]

    def heads(self, x: Tensor, name: str, positions: Tensor | None) -> Tensor:
        """Queries, keys or values; norms and rotation where there are positions."""
        y = (x @ self.get(f"self_attn.{name}_proj").T).unflatten(-1, (-1, self.head_dim))
        if positions is None:
            return y
        if f"{self.prefix}.self_attn.{name}_norm.weight" in self.tensors:
            y = rms_norm(y, self.get(f"self_attn.{name}_norm"), self.eps)
        return rotated(y, positions, self.theta)

    def feed_forward(self, x: Tensor) -> Tensor:
        h = rms_norm(x, self.get("post_attention_layernorm"), self.eps)
        return x + gated(h, self.get("mlp.gate_proj"), self.get("mlp.up_proj"), self.get("mlp.down_proj"))


def block_logits(
    tensors: Tensors,
    context: Tensor,
    block: Tensor,
    head: Tensor,
    visible: Callable[[int, Tensor, Tensor, int], Tensor],
    *,
    head_dim: int,
    eps: float = 1e-6,
) -> Tensor:
    """DFlash: logits of a block's masks.

    `context`: taps of all tokens before the anchor, side by side. `block`: embeddings of the anchor and the masks.
    `visible(layer, query positions, key positions, anchor)` says who sees whom.
    """
    anchor, rows = len(context), len(block)
    places = torch.arange(anchor + rows)
    here = places[anchor:]
    ctx = rms_norm(context @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    x = block
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    for number in range(count):
        layer = DenseLayer(tensors, f"layers.{number}", head_dim=head_dim, eps=eps)
        h = rms_norm(x, layer.get("input_layernorm"), eps)
        both = torch.cat([ctx, h])
        q, k, v = layer.heads(h, "q", here), layer.heads(both, "k", places), layer.heads(both, "v", None)
        seen = visible(number, here[:, None], places[None, :], anchor)
        x = x + attention(q, k, v, seen) @ layer.get("self_attn.o_proj").T
        x = layer.feed_forward(x)
    return rms_norm(x[1:], tensors["norm.weight"], eps) @ head.T
