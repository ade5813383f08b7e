"""A decoder's tensors in memory. Matrices that multiply the same rows are fused into one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


class StoredMatrix(ABC):
    """A matrix in a backend-specific form, such as packed blocks: see `weight_forms`."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of the numbers that the matrix stands for."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def rows(self, where: slice | Tensor) -> StoredMatrix:
        """Returns some rows of the matrix."""

    @abstractmethod
    def expand(self) -> Tensor:
        """Returns the whole matrix as a tensor."""

    @abstractmethod
    def stacked_on(self, below: Sequence[StoredMatrix]) -> StoredMatrix:
        """Returns this matrix with others of the same form below it."""


Matrix = Tensor | StoredMatrix


def plain(matrix: Matrix) -> Tensor:
    """Returns a matrix that is known to be a tensor."""
    assert isinstance(matrix, Tensor), "this matrix is in a backend-specific form"
    return matrix


def rows_of(matrix: Matrix, where: slice | Tensor) -> Matrix:
    return matrix[where] if isinstance(matrix, Tensor) else matrix.rows(where)


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Returns matrices of the same form stacked into one."""
    first, *below = matrices
    if isinstance(first, Tensor):
        return torch.cat([plain(matrix) for matrix in matrices])
    return first.stacked_on([matrix for matrix in below if isinstance(matrix, StoredMatrix)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linear:
    """A projection y = x Wᵀ + b."""

    weight: Matrix
    """[out, in]"""
    bias: Tensor | None = None

    def rows(self, where: slice | Tensor) -> Linear:
        """Returns the projection onto some of the outputs."""
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
    """The head; its weight is the embedding matrix itself if the two are tied."""


def written_out(parameters: DecoderParameters, dtype: torch.dtype | None = None) -> DecoderParameters:
    """Returns the parameters with every matrix as a tensor, converted to `dtype` if it is given. Tensors that need no
    conversion are shared."""

    def matrix(value: Matrix) -> Tensor:
        whole = value if isinstance(value, Tensor) else value.expand()
        return whole if dtype is None else whole.to(dtype)

    return mapped(parameters, matrix)


def mapped(
    parameters: DecoderParameters,
    change: Callable[[Matrix], Matrix],
    *,
    change_embedding: Callable[[Matrix], Matrix] | None = None,
) -> DecoderParameters:
    """Returns the parameters with every matrix changed except those of experts. A matrix that is used twice is changed
    once. `change_embedding`: the change for the embedding, where that is another one."""
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
        embedding=(change_embedding or once)(parameters.embedding),
        layers=tuple(
            replace(layer, qkv=layer.qkv.mapped(once), out=layer.out.mapped(once), mlp=mlp(layer.mlp))
            for layer in parameters.layers
        ),
        final_norm=parameters.final_norm,
        head=parameters.head.mapped(once),
    )
