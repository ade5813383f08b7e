"""Gumbel noise as a pure function of (seed, position, token id).

    key   = mix(mix(seed) + GAMMA * (position + 1))          one 64-bit word for each row
    bits  = mix(key + GAMMA * (token + 1))                   SplitMix64, started at the key
    u     = (the upper 52 bits + 1/2) / 2**52                exactly representable, strictly inside (0, 1)
    noise = -log(-log(u))                                    float64, from -3.6 to 36.7

No state and no generator: the noise of a token is the same in any batch, next to any other tokens, on any
device. `log` and `exp` are therefore written out in additions, multiplications and divisions, which IEEE 754
defines to the last bit; those of libraries differ between devices, and between the two ends of one vector.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.kernels.splitmix import FIRST, GAMMA, SECOND, signed

LN2 = math.log(2.0)
SQRT_HALF = math.sqrt(0.5)
# log((1 + s) / (1 - s)) in odd powers of s; with |s| < 0.172 the rest is below 1e-11 of the result.
LOG_SERIES = tuple(2.0 / odd for odd in (1, 3, 5, 7, 9, 11, 13))
# exp(r) in powers of r; with |r| < 0.35 the rest is below 1e-12.
EXP_SERIES = tuple(1.0 / math.factorial(power) for power in range(11))


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise of `tokens` under `keys` (both int64, broadcast against each other), float64."""
    bits = _mix(keys + (tokens + 1) * signed(GAMMA))
    uniform = (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52
    return -log(-log(uniform))


def _shift(x: Tensor, by: int) -> Tensor:
    # int64 >> repeats the sign bit.
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(FIRST)
    x = (x ^ _shift(x, 27)) * signed(SECOND)
    return x ^ _shift(x, 31)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive float64, to about 1e-11 of its value, equal on every device."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < SQRT_HALF
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    scale = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return scale * LN2 + s * _series(s * s, LOG_SERIES)


def exp_fixed(x: Tensor, bits: int) -> Tensor:
    """exp(x) for x <= 0 as int64 with `bits` binary places: such numbers add up to the same in any order."""
    lowest = -bits - 2
    halvings = torch.floor(x.clamp(min=lowest * LN2) * (1.0 / LN2) + 0.5)
    power = _series(x.clamp(min=lowest * LN2) - halvings * LN2, EXP_SERIES)
    scales = torch.tensor([2.0 ** (bits - n) for n in range(-lowest + 1)], dtype=torch.float64, device=x.device)
    return torch.floor(power * scales[(-halvings).to(torch.int64)]).to(torch.int64)


def _series(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total
