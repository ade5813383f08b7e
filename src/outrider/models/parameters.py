"""A decoder's tensors, as they lie in memory: fused where one product serves several names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.models.packed import PackedMatrix

Matrix = Tensor | PackedMatrix


def plain(matrix: Matrix) -> Tensor:
    """A matrix that is known to be written out."""
    assert isinstance(matrix, Tensor), "this matrix is packed"
    return matrix


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linear:
    """y = x Wᵀ + b."""

    weight: Matrix
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
    embedding: Matrix
    layers: tuple[LayerParameters, ...]
    final_norm: Tensor
    head: Linear
    """The embedding's own matrix where the head is tied."""


def written_out(parameters: DecoderParameters, dtype: torch.dtype | None = None) -> DecoderParameters:
    """The same without packed matrices, and all matrices of one type if it is given; what is so already is shared."""
    done: dict[int, Tensor] = {}

    def matrix(value: Matrix) -> Tensor:
        if id(value) not in done:
            whole = value if isinstance(value, Tensor) else value.expand()
            done[id(value)] = whole if dtype is None else whole.to(dtype)
        return done[id(value)]

    def linear(value: Linear) -> Linear:
        return replace(value, weight=matrix(value.weight))

    def mlp(value: DenseMLP | ExpertsMLP) -> DenseMLP | ExpertsMLP:
        if isinstance(value, DenseMLP):
            return DenseMLP(gate_up=linear(value.gate_up), down=linear(value.down))
        return replace(value, router=linear(value.router))

    return DecoderParameters(
        embedding=matrix(parameters.embedding),
        layers=tuple(
            replace(layer, qkv=linear(layer.qkv), out=linear(layer.out), mlp=mlp(layer.mlp))
            for layer in parameters.layers
        ),
        final_norm=parameters.final_norm,
        head=linear(parameters.head),
    )
