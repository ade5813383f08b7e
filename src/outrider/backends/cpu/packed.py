"""Packed matrices: blocks of 32 small integers with a scale, as quantised files store them.

The numbers that a block stands for are defined exactly, in float32, so nothing is lost by keeping it packed. Two forms
hold what the simpler quantisations of GGUF store. Their 16-bit scales are float32 here, with so few significant bits
(at most 20) that the product with an integer is exact.

    FOUR_BITS    scale, lowest, 16 bytes      scale * number + lowest       Q4_0, Q4_1, Q4_K
    EIGHT_BITS   scale, 32 signed bytes       scale * number                Q5_0, Q8_0

A third form is for drafters, and nothing is stored in it: one scale for a whole row, which comes before its blocks.

    COARSE       32 bytes                     scale * (number - 64)

Scale and lowest are float32. With four bits, byte i holds integer i in its low half and integer i + 16 in its high
half.

In memory 16 rows are interleaved. A block has the 16 scales, then (FOUR_BITS) the 16 lowest values, then four bytes of
each row, the next four bytes of each row, and so on. One load thus reads the same place of 16 rows, and a product has
one row in each lane, with nothing to add up across lanes. The last group is filled up to 16 rows with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from outrider.models.parameters import StoredMatrix

BLOCK = 32
INTERLEAVED = 16
"""Number of rows that are interleaved."""
COARSE_OFFSET = 64
"""What is added to a coarse weight to store it: it is not negative then, and 7 bits long."""

_WORD_BYTES = 4
# An embedding may take most of the memory, so it is not copied whole.
_CHUNK_BYTES = 4 << 20


class Packing(Enum):
    FOUR_BITS = "four bits"
    EIGHT_BITS = "eight bits"
    COARSE = "coarse"

    @property
    def block_bytes(self) -> int:
        return {Packing.FOUR_BITS: 24, Packing.EIGHT_BITS: 36, Packing.COARSE: 32}[self]

    @property
    def head_bytes(self) -> int:
        """Number of bytes before the first block of a row."""
        return 4 if self is Packing.COARSE else 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedMatrix(StoredMatrix):
    packing: Packing
    data: Tensor
    """Interleaved bytes: [rows, filled up to a multiple of 16, blocks * block_bytes]. A row of this tensor is not a row
    of the matrix."""
    count: int
    """Number of rows in the matrix."""

    @classmethod
    def of(cls, packing: Packing, rows: Tensor) -> PackedMatrix:
        """Returns the matrix made of a copy of these rows of blocks, [rows, blocks * block_bytes]."""
        data = rows.new_empty(filled_up(len(rows)), rows.shape[1])
        data[: len(rows)] = rows
        interleave(packing, data, len(rows))
        return cls(packing=packing, data=data, count=len(rows))

    @property
    def shape(self) -> tuple[int, int]:
        blocks = (self.data.shape[1] - self.packing.head_bytes) // self.packing.block_bytes
        return self.count, blocks * BLOCK

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def deinterleaved(self) -> Tensor:
        """Returns the rows of blocks in order: [rows, blocks * block_bytes]."""
        groups = self.data.view(torch.int32).view(-1, self.data.shape[1] // _WORD_BYTES, INTERLEAVED)
        return groups.transpose(1, 2).contiguous().view(len(self.data), -1).view(torch.uint8)[: self.count]

    def rows(self, where: slice | Tensor) -> PackedMatrix:
        """Returns some rows of the matrix, which share its memory if they are whole groups of 16."""
        if isinstance(where, slice):
            start, stop, step = where.indices(self.count)
            if (
                step == 1
                and start % INTERLEAVED == 0
                and (stop % INTERLEAVED == 0 or stop == self.count)
                and start < stop
            ):
                return PackedMatrix(packing=self.packing, data=self.data[start : filled_up(stop)], count=stop - start)
        return PackedMatrix.of(self.packing, self.deinterleaved()[where])

    def expand(self) -> Tensor:
        return unpack(self.packing, self.deinterleaved())

    def stacked_on(self, below: Sequence[StoredMatrix]) -> PackedMatrix:
        matrices = [self, *(matrix for matrix in below if isinstance(matrix, PackedMatrix))]
        assert len(matrices) == 1 + len(below) and all(matrix.packing is self.packing for matrix in matrices)
        if all(matrix.count % INTERLEAVED == 0 for matrix in matrices[:-1]):
            count = sum(matrix.count for matrix in matrices)
            return PackedMatrix(packing=self.packing, data=torch.cat([matrix.data for matrix in matrices]), count=count)
        return PackedMatrix.of(self.packing, torch.cat([matrix.deinterleaved() for matrix in matrices]))


def filled_up(rows: int) -> int:
    """Returns the number of rows in memory for this many rows of a matrix: the next multiple of 16."""
    return -(-rows // INTERLEAVED) * INTERLEAVED


def interleave(packing: Packing, data: Tensor, count: int) -> None:
    """Interleaves rows of blocks in place. Rows after the first `count` are overwritten with zeros."""
    assert len(data) == filled_up(count)
    assert (data.shape[1] - packing.head_bytes) % packing.block_bytes == 0
    data[count:] = 0
    words = data.shape[1] // _WORD_BYTES
    groups = data.view(torch.int32).view(-1, INTERLEAVED, words)
    step = max(1, _CHUNK_BYTES // (INTERLEAVED * data.shape[1]))
    for start in range(0, len(groups), step):
        chunk = groups[start : start + step]
        chunk.view(-1, words, INTERLEAVED).copy_(chunk.transpose(1, 2).contiguous())


def unpack(packing: Packing, data: Tensor) -> Tensor:
    """Returns the numbers that rows of blocks stand for: float32 [rows, columns]."""
    if packing is Packing.COARSE:
        scale = data[:, :4].contiguous().view(torch.float32)
        return (data[:, 4:].float() - COARSE_OFFSET) * scale
    blocks = data.reshape(len(data), -1, packing.block_bytes)
    if packing is Packing.EIGHT_BITS:
        scale = blocks[..., :4].contiguous().view(torch.float32)
        return (blocks[..., 4:].contiguous().view(torch.int8).float() * scale).flatten(1)
    scale, lowest = blocks[..., :8].contiguous().view(torch.float32).split(1, dim=-1)
    numbers = torch.cat([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], dim=-1).float()
    # The product is exact, so the sum is rounded once, as in the kernels.
    values: Tensor = numbers * scale + lowest
    return values.flatten(1)
