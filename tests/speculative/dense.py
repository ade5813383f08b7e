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
    queries_per_key = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(queries_per_key, dim=1), v.repeat_interleave(queries_per_key, dim=1)
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
    `visible(layer, query positions, key positions, anchor)` says which keys a query sees.
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


class AheadReference:
    """EAGLE and MTP: one layer that pairs features of p with token p + 1. Subclasses say how rows enter and leave."""

    def __init__(self, tensors: Tensors, target: LoadedModel, *, layer: str, head_dim: int, eps: float = 1e-6) -> None:
        self.tensors, self.target, self.eps = tensors, target, eps
        self.layer = DenseLayer(tensors, layer, head_dim=head_dim, eps=eps)
        self.embedding = tensors.get("embed_tokens.weight", target.parameters.embedding)
        self.head = tensors.get("lm_head.weight", target.parameters.head.weight)

    def features(self, tokens: Sequence[int]) -> Tensor:
        """The features of all positions of the target."""
        raise NotImplementedError

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of a row and the features of the next row."""
        raise NotImplementedError

    def last_normed(self, tokens: Sequence[int]) -> Tensor:
        """The target's hidden states after its last norm."""
        last = target_layers(self.target, tokens)[-1]
        return rms_norm(last, self.target.parameters.final_norm, self.target.spec.norm_eps)

    def logits(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """At each draft, given the drafts before it: [drafts, the draft vocabulary]."""
        features = self.features(tokens[:-1])
        inputs, residuals = self.enter(self.embedding[torch.tensor(tokens[1:])], features)
        found = []
        for draft in drafts:
            places = torch.arange(len(inputs))
            q = self.layer.heads(inputs[-1:], "q", places[-1:])
            k, v = self.layer.heads(inputs, "k", places), self.layer.heads(inputs, "v", None)
            attended = attention(q, k, v, torch.ones(1, len(inputs), dtype=torch.bool))
            x = residuals[-1:] + attended @ self.layer.get("self_attn.o_proj").T
            logits, carried = self.leave(self.layer.feed_forward(x))
            found.append(logits[0])
            more, residual = self.enter(self.embedding[draft][None], carried)
            inputs, residuals = torch.cat([inputs, more]), torch.cat([residuals, residual])
        return torch.stack(found)


class FirstReference(AheadReference):
    """A dense reference of EAGLE-1."""

    def features(self, tokens: Sequence[int]) -> Tensor:
        return self.last_normed(tokens)

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([embedded, features], dim=-1) @ self.tensors["fc.weight"].T
        x = x + self.tensors.get("fc.bias", torch.zeros(()))
        return x, x

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.head.T, x


class ThirdReference(AheadReference):
    """A dense reference of EAGLE-3."""

    taps: tuple[int, ...] = ()
    normed_residual = False

    def features(self, tokens: Sequence[int]) -> Tensor:
        leaving = target_layers(self.target, tokens)
        taps = torch.cat([leaving[tap] for tap in self.taps], dim=-1)
        if "input_norm.weight" in self.tensors:
            taps = rms_norm(taps, self.tensors["input_norm.weight"], self.eps)
        return taps @ self.tensors["fc.weight"].T

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(features, self.layer.get("hidden_norm"), self.eps)
        embedded = rms_norm(embedded, self.layer.get("input_layernorm"), self.eps)
        return torch.cat([embedded, normed], dim=-1), normed if self.normed_residual else features

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, self.tensors["norm.weight"], self.eps) @ self.head.T, x


class ModuleReference(AheadReference):
    """MTP: names of the DeepSeek layout, or of the Qwen one, which carries its normed output on."""

    names: tuple[str, str, str, str] = ("", "", "", "")
    carries_normed = False

    def features(self, tokens: Sequence[int]) -> Tensor:
        return self.last_normed(tokens)

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        join, embedding_norm, feature_norm, _ = (self.tensors[name] for name in self.names)
        embedded = rms_norm(embedded, embedding_norm, self.eps)
        x = torch.cat([embedded, rms_norm(features, feature_norm, self.eps)], dim=-1) @ join.T
        return rms_norm(x, self.layer.get("input_layernorm"), self.eps), x

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(x, self.tensors[self.names[3]], self.eps)
        return normed @ self.target.parameters.head.weight.T, normed if self.carries_normed else x
