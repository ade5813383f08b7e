"""MXFP4: blocks of 32 4-bit numbers with a common power of two, as gpt-oss stores its experts.

    NAME_blocks    bytes [experts, rows, blocks of a row, 16]: two numbers each, the first in the low half
    NAME_scales    bytes [experts, rows, blocks of a row]: the exponent, plus 127

Both make up the tensor NAME, which Hugging Face stores transposed. A 4-bit number times a power of two is a bfloat16,
so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.weights.base import StoredTensor

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
EXPONENT_BIAS = 127
HALF = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NUMBERS = torch.cat([HALF, -HALF])


@dataclass(frozen=True, slots=True)
class BlockPair:
    """The names under which a tensor's two parts are stored."""

    blocks: str
    scales: str


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns float32 [rows, columns] from blocks [rows, blocks of a row, 16] and scales [rows, blocks of a row]."""
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(NUMBERS[pairs.long()], exponents).flatten(-2)


def paired(tensors: Mapping[str, StoredTensor], source: str) -> tuple[dict[str, StoredTensor], dict[str, BlockPair]]:
    """Returns the tensors with each pair as one tensor, and the pairs by the names of these tensors."""
    pairs = {
        name.removesuffix(BLOCKS): BlockPair(name, name.removesuffix(BLOCKS) + SCALES)
        for name in tensors
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in tensors
    }
    hidden = {stored for pair in pairs.values() for stored in (pair.blocks, pair.scales)}
    found = {name: tensor for name, tensor in tensors.items() if name not in hidden}
    for name, pair in pairs.items():
        blocks, scales = tensors[pair.blocks], tensors[pair.scales]
        if len(scales.shape) != 3 or blocks.shape != (*scales.shape, BLOCK // 2):
            raise ModelError(
                f"{source}: {pair.blocks} {list(blocks.shape)} and {pair.scales} {list(scales.shape)} do not belong "
                "together: for each scale there must be 16 bytes"
            )
        experts, rows, count = scales.shape
        found[name] = StoredTensor((experts, count * BLOCK, rows), blocks.stored_bytes + scales.stored_bytes, "MXFP4")
    return found, pairs
