"""A decoder's tensors, as they lie in memory: fused where one product serves several names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.models.packed import PackedMatrix, stacked_packed

Matrix = Tensor | PackedMatrix


def plain(matrix: Matrix) -> Tensor:
    """A matrix that is known to be written out."""
    assert isinstance(matrix, Tensor), "this matrix is packed"
    return matrix


def rows_of(matrix: Matrix, where: slice | Tensor) -> Matrix:
    if isinstance(matrix, PackedMatrix):
        return matrix.rows(where)
    return matrix[where]


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one kind, one below the other."""
    first = matrices[0]
    if isinstance(first, PackedMatrix):
        parts = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
        assert len(parts) == len(matrices)
        return stacked_packed(parts)
    return torch.cat([plain(matrix) for matrix in matrices])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linear:
    """y = x Wᵀ + b."""

    weight: Matrix
    """[out, in]"""
    bias: Tensor | None = None

    def rows(self, where: slice | Tensor) -> Linear:
        """Some of its outputs."""
        return Linear(weight=rows_of(self.weight, where), bias=None if self.bias is None else self.bias[where])

    def mapped(self, change: Callable[[Matrix], Matrix]) -> Linear:
        return replace(self, weight=change(self.weight))


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

    def matrix(value: Matrix) -> Tensor:
        whole = value if isinstance(value, Tensor) else value.expand()
        return whole if dtype is None else whole.to(dtype)

    return mapped(parameters, matrix)


def mapped(parameters: DecoderParameters, change: Callable[[Matrix], Matrix]) -> DecoderParameters:
    """The same with every matrix changed but those of experts, and one that is used twice changed once."""
    done: dict[int, Matrix] = {}

    def once(value: Matrix) -> Matrix:
        if id(value) not in done:
            done[id(value)] = change(value)
        return done[id(value)]

    def mlp(value: DenseMLP | ExpertsMLP) -> DenseMLP | ExpertsMLP:
        if isinstance(value, DenseMLP):
            return DenseMLP(gate_up=value.gate_up.mapped(once), down=value.down.mapped(once))
        return replace(value, router=value.router.mapped(once))

    return DecoderParameters(
        embedding=once(parameters.embedding),
        layers=tuple(
            replace(layer, qkv=layer.qkv.mapped(once), out=layer.out.mapped(once), mlp=mlp(layer.mlp))
            for layer in parameters.layers
        ),
        final_norm=parameters.final_norm,
        head=parameters.head.mapped(once),
    )
