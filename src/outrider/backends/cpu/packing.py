"""Packing of matrices: those that GGUF files store quantised, and 16-bit matrices of drafters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.backends.cpu.gguf_packing import PACKINGS, pack_rows
from outrider.backends.cpu.memory import HugePageMemory
from outrider.backends.cpu.packed import BLOCK, COARSE_OFFSET, PackedMatrix, Packing, filled_up, interleave
from outrider.models.parameters import Matrix
from outrider.models.weight_forms import Bytes, MatrixForm, WeightForms, WeightMemory

ROOM_BYTES = 16 << 20
SIXTEEN_BITS = {"F16": torch.float16, "BF16": torch.bfloat16, "MXFP4": torch.bfloat16}
"""Stored types whose numbers fit into 16 bits without loss."""
COARSE_COLUMNS_MAX = 1 << 16
"""The longest rows whose sums of products fit into 32 bits."""


class PackedForm(MatrixForm):
    """Packed blocks, of which 16 rows are interleaved once all rows are written."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def memory(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
        return (filled_up(shape[0]), shape[1] // BLOCK * self._packing.block_bytes), torch.uint8

    def write(self, stored_rows: Bytes, stored_type: str, destination: Tensor) -> None:
        pack_rows(stored_rows, stored_type, destination)

    def matrix(self, memory: Tensor, shape: tuple[int, ...]) -> Matrix:
        interleave(self._packing, memory, shape[0])
        return PackedMatrix(packing=self._packing, data=memory, count=shape[0])


_FORMS = {packing: PackedForm(packing) for packing in set(PACKINGS.values())}


class CPUWeightForms(WeightForms):
    """Weights in one block of huge pages. `packed`: matrices that are stored in fewer than 32 bits stay packed."""

    def __init__(self, *, packed: bool) -> None:
        self._packed = packed

    def form_of(self, stored_type: str) -> MatrixForm | torch.dtype | None:
        if not self._packed:
            return None
        packing = PACKINGS.get(stored_type)
        return SIXTEEN_BITS.get(stored_type) if packing is None else _FORMS[packing]

    def allocate(self, total_bytes: int, tensors: int, device: torch.device) -> WeightMemory:
        return HugePageMemory(total_bytes, tensors)


class Packer:
    """Copies packed matrices into a few large blocks of memory."""

    def __init__(self) -> None:
        self._memory = HugePageMemory(0, 0)
        self._room_bytes = 0

    def compact(self, matrix: Matrix) -> Matrix:
        """Returns a 16-bit matrix in 8 bits. A matrix of another type, or whose rows are not whole blocks, is returned
        as it is."""
        if isinstance(matrix, PackedMatrix) or matrix.dtype.itemsize != 2 or matrix.shape[1] % BLOCK:
            return matrix
        assert isinstance(matrix, Tensor)
        return self.keep(pack(matrix))

    def coarsen(self, matrix: Matrix) -> Matrix:
        """Returns a matrix in 7 bits. One that is packed, or whose rows are not whole blocks or too long, is returned
        as it is."""
        if isinstance(matrix, PackedMatrix) or matrix.shape[1] % BLOCK or matrix.shape[1] > COARSE_COLUMNS_MAX:
            return matrix
        assert isinstance(matrix, Tensor)
        return self.keep(pack_coarsely(matrix))

    def keep(self, matrix: PackedMatrix) -> PackedMatrix:
        """Returns a copy of the matrix in this packer's memory."""
        size = matrix.nbytes
        if size > self._room_bytes:
            self._room_bytes = max(size, ROOM_BYTES)
            self._memory = HugePageMemory(self._room_bytes, 0)
        data = self._memory.empty(tuple(matrix.data.shape), torch.uint8).copy_(matrix.data)
        self._room_bytes -= size + 64
        return replace(matrix, data=data)


def pack(values: Tensor) -> PackedMatrix:
    """Returns the matrix of the nearest 8-bit integers, with a scale for each block."""
    rows, columns = values.shape
    blocks = values.float().view(rows, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    numbers = (blocks / scale).round().to(torch.int8)
    data = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], dim=-1)
    return PackedMatrix.of(Packing.EIGHT_BITS, data.flatten(1))


def pack_coarsely(values: Tensor) -> PackedMatrix:
    """Returns the matrix of the nearest 7-bit integers, with a scale for each row."""
    values = values.float()
    largest = values.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / (COARSE_OFFSET - 1), torch.ones_like(largest))
    numbers = ((values / scale).round() + COARSE_OFFSET).to(torch.uint8)
    return PackedMatrix.of(Packing.COARSE, torch.cat([scale.view(torch.uint8), numbers], dim=-1))
