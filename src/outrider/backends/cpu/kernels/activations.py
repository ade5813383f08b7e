"""Gated activations of vectors, with the sigmoid and tanh that they use."""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.backends.cpu.kernels.vector import (
    add,
    choose_below,
    div,
    exp,
    fma,
    magnitude,
    maximum,
    minimum,
    mul,
    splat,
    sub,
    with_sign,
)

NONE, SILU, GELU_TANH, CLAMPED_SWIGLU = range(4)

_ONE, _ZERO, _LIMIT = np.float32(1.0), np.float32(0.0), np.float32(7.0)
_SWIGLU_SLOPE = np.float32(1.702)
# gelu's tanh(u) enters as (1 + tanh(u)) / 2, which is the sigmoid of 2u.
_GELU_OUTER, _GELU_INNER = np.float32(2 * 0.7978845608028654), np.float32(0.044715)
_TWO, _NEAR = np.float32(2.0), np.float32(0.3)
_TANH_TERMS = tuple(np.float32(term) for term in (62 / 2835, -17 / 315, 2 / 15, -1 / 3))


@njit(inline="always")
def sigmoid(x):
    return div(splat(_ONE), add(splat(_ONE), exp(sub(splat(_ZERO), x))))


@njit(inline="always")
def gate(kind, gates, ups):
    if kind == SILU:
        return mul(mul(gates, sigmoid(gates)), ups)
    if kind == GELU_TANH:
        cubic = mul(mul(gates, gates), mul(gates, splat(_GELU_INNER)))
        return mul(mul(gates, sigmoid(mul(add(gates, cubic), splat(_GELU_OUTER)))), ups)
    low = minimum(splat(_LIMIT), gates)
    clamped = maximum(splat(_ZERO - _LIMIT), minimum(splat(_LIMIT), ups))
    return mul(mul(low, sigmoid(mul(low, splat(_SWIGLU_SLOPE)))), add(clamped, splat(_ONE)))


@njit(inline="always")
def tanh(x):
    """Returns tanh(x), by a polynomial near 0, where the quotient would cancel."""
    size = magnitude(x)
    power = exp(mul(size, splat(_ZERO - _TWO)))
    far = with_sign(div(sub(splat(_ONE), power), add(splat(_ONE), power)), x)
    square = mul(x, x)
    near = splat(_TANH_TERMS[0])
    near = fma(near, square, splat(_TANH_TERMS[1]))
    near = fma(near, square, splat(_TANH_TERMS[2]))
    near = fma(near, square, splat(_TANH_TERMS[3]))
    near = fma(mul(x, square), near, x)
    return choose_below(size, splat(_NEAR), near, far)
