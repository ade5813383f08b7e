"""A decoder's tensors, as they lie in memory: fused where one product serves several names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linear:
    """y = x Wᵀ + b."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenseMLP:
    gate_up: Linear
    """Gate rows first, then up rows: [2 * intermediate, hidden]."""
    down: Linear


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertsMLP:
    router: Linear
    gate_up: Tensor
    """[experts, 2 * intermediate, hidden], gate rows first."""
    down: Tensor
    """[experts, hidden, intermediate]"""
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerParameters:
    input_norm: Tensor
    qkv: Linear
    """Query rows, key rows, value rows."""
    out: Linear
    mlp_norm: Tensor
    mlp: DenseMLP | ExpertsMLP
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None
    """[heads]"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderParameters:
    embedding: Tensor
    layers: tuple[LayerParameters, ...]
    final_norm: Tensor
    head: Linear
    """The embedding's own tensor where the head is tied."""
