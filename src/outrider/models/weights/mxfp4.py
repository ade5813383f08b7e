"""MXFP4: blocks of 32 numbers of 4 bits under a common power of two, as gpt-oss stores its experts.

    NAME_blocks    bytes [experts, rows, blocks of a row, 16]: two numbers each, the first in the low half
    NAME_scales    bytes [experts, rows, blocks of a row]: the exponent, plus 127

Together they are the tensor NAME, whose rows and columns Hugging Face has the other way round. A number of one
significant bit times a power of two is a bfloat16: nothing is lost.
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
    """[rows, blocks of a row, 16] and [rows, blocks of a row] to float32 [rows, columns]."""
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(NUMBERS[pairs.long()], exponents).flatten(-2)


def paired(tensors: Mapping[str, StoredTensor], source: str) -> tuple[dict[str, StoredTensor], dict[str, BlockPair]]:
    """The tensors with each pair as one, and what each of these is made of."""
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
        found[name] = StoredTensor(
            (experts, count * BLOCK, rows), blocks.stored_bytes + scales.stored_bytes, torch.bfloat16
        )
    return found, pairs
