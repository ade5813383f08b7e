"""Matrices that stay packed: blocks of 32 small whole numbers with a scale, as quantised files have them.

What a block stands for is defined exactly, in float32, so nothing is lost by keeping it: it is unpacked where it is
used. Two forms hold what the simpler quantisations of GGUF store; their scales, of 16 bits there, are float32 here,
of so few significant bits (at most 20) that their product with a number is exact.

    FOUR_BITS    scale, lowest, 16 bytes      scale * number + lowest       Q4_0, Q4_1, Q4_K
    EIGHT_BITS   scale, 32 signed bytes       scale * number                Q5_0, Q8_0
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

BLOCK = 32


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
    """Bytes, [rows, blocks * block_bytes]."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] // self.packing.block_bytes * BLOCK

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

    def expand(self) -> Tensor:
        """All of it, in float32."""
        return unpack(self.packing, self.data)


def unpack(packing: Packing, data: Tensor) -> Tensor:
    """Bytes [rows, …] to float32 [rows, columns]."""
    blocks = data.reshape(len(data), -1, packing.block_bytes)
    if packing is Packing.EIGHT_BITS:
        scale = blocks[..., :4].contiguous().view(torch.float32)
        return (blocks[..., 4:].contiguous().view(torch.int8).float() * scale).flatten(1)
    scale, lowest = blocks[..., :8].contiguous().view(torch.float32).split(1, dim=-1)
    numbers = torch.cat([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], dim=-1).float()
    # The product is exact, so this is rounded once, as in compiled code.
    values: Tensor = numbers * scale + lowest
    return values.flatten(1)
