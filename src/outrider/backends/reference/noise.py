"""Gumbel noise as a pure function of (seed, position, token id).

    key   = mix(mix(seed) + GAMMA * (position + 1))          one 64-bit word for each row
    bits  = mix(key + GAMMA * (token + 1))                   SplitMix64, started at the key
    u     = (the upper 52 bits + 1/2) / 2**52                exactly representable, strictly inside (0, 1)
    noise = -log(-log(u))                                    float64, from -3.6 to 36.7

There is no state and no generator: the noise of a token is the same in any batch, beside any other tokens, on any
device. `log` and `exp` are therefore written out in additions, multiplications and divisions, which IEEE 754 defines
to the last bit. Library versions differ between devices, and between the body and the tail of one vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.backends.keyed_noise import (
    EXP_SERIES,
    FIRST,
    GAMMA,
    LN2,
    LOG_SERIES,
    SECOND,
    SQRT_HALF,
    WEIGHT_BITS,
    WEIGHT_HALVINGS,
    signed,
)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Returns the float64 noise of `tokens` under `keys`, both int64 and broadcast against each other."""
    bits = _mix(keys + (tokens + 1) * signed(GAMMA))
    uniform = (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52
    return -log(-log(uniform))


def _shift(x: Tensor, by: int) -> Tensor:
    # A right shift of an int64 repeats the sign bit.
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(FIRST)
    x = (x ^ _shift(x, 27)) * signed(SECOND)
    return x ^ _shift(x, 31)


def log(x: Tensor) -> Tensor:
    """Returns the natural logarithm of normal positive float64 numbers, to a relative error of about 1e-11, with the
    same bits on every device."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < SQRT_HALF
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    scale = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return scale * LN2 + s * _series(s * s, LOG_SERIES)


def weight(y: Tensor) -> Tensor:
    """Returns exp(y) of float64 y <= 0, as int64 with WEIGHT_BITS binary places."""
    y = y.clamp(min=-WEIGHT_HALVINGS * LN2)
    halvings = torch.floor(y * (1.0 / LN2) + 0.5)
    power = _series(y - halvings * LN2, EXP_SERIES)
    scales = [2.0 ** (WEIGHT_BITS - n) for n in range(WEIGHT_HALVINGS + 1)]
    scale = torch.tensor(scales, dtype=torch.float64, device=y.device)[(-halvings).to(torch.int64)]
    return torch.floor(power * scale).to(torch.int64)


def _series(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total
