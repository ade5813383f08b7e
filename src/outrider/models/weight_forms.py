"""The forms of weights in memory: the contract between checkpoints, which store them, and backends, which use them.

A file may store a matrix in fewer bits than the model computes in. A backend that can compute with the stored numbers,
or with a lossless form of them, names that form here; every other matrix is converted to the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.parameters import Matrix

Bytes = npt.NDArray[np.uint8]


class MatrixForm(ABC):
    """A backend-specific form of matrices that a file stores in blocks of small integers with a scale."""

    @abstractmethod
    def memory(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns the shape and dtype of the memory for a matrix of this shape. The rows of the matrix come first."""

    @abstractmethod
    def write(self, stored_rows: Bytes, stored_type: str, destination: Tensor) -> None:
        """Writes rows of stored blocks to rows of that memory."""

    @abstractmethod
    def matrix(self, memory: Tensor, shape: tuple[int, ...]) -> Matrix:
        """Returns the matrix once all of its rows are written."""


class WeightMemory(ABC):
    """An allocator of uninitialised tensors for weights."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


class PlainMemory(WeightMemory):
    """An allocator that leaves each tensor to PyTorch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


class WeightForms:
    """The forms in which a backend keeps weights. This base class converts every matrix to the model's dtype."""

    def form_of(self, stored_type: str) -> MatrixForm | torch.dtype | None:
        """Returns the form for a stored type, by the file format's own name for it (Q4_1, BF16, …), or
        None if it is to be converted."""
        return None

    def allocate(self, total_bytes: int, tensors: int, device: torch.device) -> WeightMemory:
        """Returns an allocator for the tensors of a model, given their number and their total size."""
        return PlainMemory(device)


DENSE = WeightForms()
