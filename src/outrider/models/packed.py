"""Matrices that stay packed: blocks of 32 small whole numbers with a scale, as quantised files have them.

What a block stands for is defined exactly, in float32, so nothing is lost by keeping it. Two forms hold what the
simpler quantisations of GGUF store; their scales, of 16 bits there, are float32 here, of so few significant bits (at
most 20) that their product with a number is exact.

    FOUR_BITS    scale, lowest, 16 bytes      scale * number + lowest       Q4_0, Q4_1, Q4_K
    EIGHT_BITS   scale, 32 signed bytes       scale * number                Q5_0, Q8_0

Scale and lowest are float32. Of 4-bit numbers, byte i holds number i in its low and number i + 16 in its high half.

In memory 16 rows are woven together: of a block, first the 16 scales, then (FOUR_BITS) the 16 lowest, then four bytes
of each row, the next four of each, and so on. So one load brings the same place of 16 rows, and a product has a row in
each lane, with nothing to be added up across them. The last rows are filled up to 16 with rows of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

BLOCK = 32
WOVEN = 16
"""Rows that lie woven together."""

_WORD_BYTES = 4
# An embedding may take most of the memory: copies of it must not.
_CHUNK_BYTES = 4 << 20


class Packing(Enum):
    FOUR_BITS = "four bits"
    EIGHT_BITS = "eight bits"

    @property
    def block_bytes(self) -> int:
        return 24 if self is Packing.FOUR_BITS else 36


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedMatrix:
    packing: Packing
    data: Tensor
    """Bytes, woven: [rows filled up to a multiple of 16, blocks * block_bytes]. A line of it is no row."""
    count: int
    """Of rows."""

    @classmethod
    def of(cls, packing: Packing, rows: Tensor) -> PackedMatrix:
        """From rows of blocks, [rows, blocks * block_bytes], which stay as they are."""
        data = rows.new_empty(filled_up(len(rows)), rows.shape[1])
        data[: len(rows)] = rows
        weave(packing, data, len(rows))
        return cls(packing=packing, data=data, count=len(rows))

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.data.shape[1] // self.packing.block_bytes * BLOCK

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that it stands for."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def unwoven(self) -> Tensor:
        """Rows of blocks."""
        groups = self.data.view(torch.int32).view(-1, self.data.shape[1] // _WORD_BYTES, WOVEN)
        return groups.transpose(1, 2).contiguous().view(len(self.data), -1).view(torch.uint8)[: self.count]

    def rows(self, where: slice | Tensor) -> PackedMatrix:
        """Some of them: where these are whole groups, the same memory."""
        if isinstance(where, slice):
            start, stop, step = where.indices(self.count)
            if step == 1 and start % WOVEN == 0 and (stop % WOVEN == 0 or stop == self.count) and start < stop:
                return PackedMatrix(packing=self.packing, data=self.data[start : filled_up(stop)], count=stop - start)
        return PackedMatrix.of(self.packing, self.unwoven()[where])

    def expand(self) -> Tensor:
        """All of it, in float32."""
        return unpack(self.packing, self.unwoven())


def stacked_packed(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Matrices of one packing, one below the other."""
    packing = matrices[0].packing
    assert all(matrix.packing is packing for matrix in matrices)
    if all(matrix.count % WOVEN == 0 for matrix in matrices[:-1]):
        count = sum(matrix.count for matrix in matrices)
        return PackedMatrix(packing=packing, data=torch.cat([matrix.data for matrix in matrices]), count=count)
    return PackedMatrix.of(packing, torch.cat([matrix.unwoven() for matrix in matrices]))


def filled_up(rows: int) -> int:
    return -(-rows // WOVEN) * WOVEN


def weave(packing: Packing, data: Tensor, count: int) -> None:
    """Rows of blocks, where they lie; what lies behind the first `count` of them is overwritten with zeros."""
    assert len(data) == filled_up(count)
    assert data.shape[1] % packing.block_bytes == 0
    data[count:] = 0
    words = data.shape[1] // _WORD_BYTES
    groups = data.view(torch.int32).view(-1, WOVEN, words)
    step = max(1, _CHUNK_BYTES // (WOVEN * data.shape[1]))
    for start in range(0, len(groups), step):
        chunk = groups[start : start + step]
        chunk.view(-1, words, WOVEN).copy_(chunk.transpose(1, 2).contiguous())


def unpack(packing: Packing, data: Tensor) -> Tensor:
    """Rows of blocks, [rows, …], to float32 [rows, columns]."""
    blocks = data.reshape(len(data), -1, packing.block_bytes)
    if packing is Packing.EIGHT_BITS:
        scale = blocks[..., :4].contiguous().view(torch.float32)
        return (blocks[..., 4:].contiguous().view(torch.int8).float() * scale).flatten(1)
    scale, lowest = blocks[..., :8].contiguous().view(torch.float32).split(1, dim=-1)
    numbers = torch.cat([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], dim=-1).float()
    # The product is exact, so this is rounded once, as in compiled code.
    values: Tensor = numbers * scale + lowest
    return values.flatten(1)
