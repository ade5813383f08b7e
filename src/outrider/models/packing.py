"""Packing matrices that were stored with more bits: for drafters, whose proposals are verified anyway."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.models.packed import BLOCK, PackedMatrix, Packing
from outrider.models.parameters import Matrix
from outrider.models.weights.memory import WeightMemory

ROOM_BYTES = 16 << 20


class Packer:
    """Matrices of 16 bits to 8, side by side in memory."""

    def __init__(self) -> None:
        self._memory = WeightMemory(0, 0, torch.device("cpu"))
        self._room = 0

    def __call__(self, matrix: Matrix) -> Matrix:
        """What has other than 16 bits, or no whole blocks, stays as it is."""
        if isinstance(matrix, PackedMatrix) or matrix.dtype.itemsize != 2 or matrix.shape[1] % BLOCK:
            return matrix
        return self.keep(pack(matrix))

    def keep(self, matrix: PackedMatrix) -> PackedMatrix:
        """The same, here."""
        size = matrix.nbytes
        if size > self._room:
            self._room = max(size, ROOM_BYTES)
            self._memory = WeightMemory(self._room, 0, torch.device("cpu"))
        data = self._memory.empty(tuple(matrix.data.shape), torch.uint8).copy_(matrix.data)
        self._room -= size + 64
        return replace(matrix, data=data)


def pack(values: Tensor) -> PackedMatrix:
    """The nearest numbers of eight bits, a block at a time."""
    rows, columns = values.shape
    blocks = values.float().view(rows, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    numbers = (blocks / scale).round().to(torch.int8)
    data = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], dim=-1)
    return PackedMatrix.of(Packing.EIGHT_BITS, data.flatten(1))
