"""Conversion of quantised rows of GGUF files to the packed forms that kernels read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.backends.cpu.packed import BLOCK, Packing
from outrider.models.weight_forms import Bytes

PACKINGS = {
    "Q4_0": Packing.FOUR_BITS,
    "Q4_1": Packing.FOUR_BITS,
    "Q4_K": Packing.FOUR_BITS,
    "Q5_0": Packing.EIGHT_BITS,
    "Q8_0": Packing.EIGHT_BITS,
}
STORED_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144, "Q5_0": 22, "Q8_0": 34}

# An embedding may take most of the memory, so it is not copied whole.
CHUNK_BYTES = 1 << 22

Floats = npt.NDArray[np.float32]


def pack_rows(rows: Bytes, stored_type: str, destination: Tensor) -> None:
    """Writes rows of stored blocks as rows of packed blocks, which stand for the same numbers to the last bit."""
    step = max(1, CHUNK_BYTES // rows.shape[1])
    for start in range(0, len(rows), step):
        _pack_chunk(rows[start : start + step], stored_type, destination[start : start + step])


def _pack_chunk(rows: Bytes, stored_type: str, destination: Tensor) -> None:
    stored = rows.reshape(-1, STORED_BLOCK_BYTES[stored_type])
    packing = PACKINGS[stored_type]
    if packing is Packing.EIGHT_BITS:
        scale, numbers = _eight_bits(stored, stored_type)
        parts = [_as_bytes(scale[:, None]), numbers.view(np.uint8)]
    else:
        scale, lowest, halves = _four_bits(stored, stored_type)
        parts = [_as_bytes(np.stack([scale, lowest], axis=-1)), halves]
    packed = np.concatenate(parts, axis=-1)
    destination.copy_(torch.from_numpy(packed).view(destination.shape))


def _eight_bits(stored: Bytes, stored_type: str) -> tuple[Floats, npt.NDArray[np.int8]]:
    scale = _half(stored, 0)
    if stored_type == "Q8_0":
        return scale, stored[:, 2:].view(np.int8)
    # Q5_0 stores the fifth bits of a block together, those of the low halves first.
    fifth = np.unpackbits(stored[:, 2:6], axis=-1, bitorder="little")
    numbers = np.concatenate([stored[:, 6:] & 15, stored[:, 6:] >> 4], axis=-1) | (fifth << 4)
    return scale, numbers.astype(np.int8) - np.int8(16)


def _four_bits(stored: Bytes, stored_type: str) -> tuple[Floats, Floats, Bytes]:
    scale = _half(stored, 0)
    if stored_type == "Q4_0":
        return scale, scale * np.float32(-8), stored[:, 2:]
    if stored_type == "Q4_1":
        return scale, _half(stored, 2), stored[:, 4:]
    return _four_bits_of_groups(stored, scale, _half(stored, 2))


def _four_bits_of_groups(stored: Bytes, scale: Floats, lowest: Floats) -> tuple[Floats, Floats, Bytes]:
    """Converts Q4_K: eight blocks with 6-bit factors of a common scale and a common lowest value."""
    factors = stored[:, 4:16]
    first, second, third = factors[:, 0:4], factors[:, 4:8], factors[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1).astype(np.float32)
    depths = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1).astype(np.float32)
    # 32 bytes hold two blocks, one in the low and one in the high halves; a packed block has 16 bytes of its own.
    pairs = stored[:, 16:].reshape(-1, 4, 1, BLOCK)
    numbers = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, BLOCK)
    halves = numbers[:, :16] | (numbers[:, 16:] << 4)
    return (scale[:, None] * scales).ravel(), -(lowest[:, None] * depths).ravel(), halves


def _half(stored: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(stored[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)


def _as_bytes(values: Floats) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)
