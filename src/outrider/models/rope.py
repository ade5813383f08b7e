"""Rotary tables: cosines and sines per position, for each way of stretching frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.models.spec import RopeScaling, RopeSpec


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """One frequency per rotated pair, in float64."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.scaling is RopeScaling.NONE:
        return plain
    if rope.scaling is RopeScaling.LINEAR:
        return plain / rope.factor
    if rope.scaling is RopeScaling.LLAMA3:
        return _llama3(rope, plain)
    return _yarn(rope, plain)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn seldom are stretched, with a ramp between."""

    def dimension(turns: float) -> float:
        context = rope.original_max_position
        return rope.rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero, as every implementation does
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def rotary_table(rope: RopeSpec, positions: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[positions, rotary_dim]: the cosines of a position, then its sines.

    Angles are made in float32 from float32 frequencies, as the models' own code makes them, so that the table
    carries the same rounding.
    """
    frequencies = inverse_frequencies(rope).to(torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
    return table.to(device=device, dtype=dtype)
