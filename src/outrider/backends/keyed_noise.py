"""Keyed noise: SplitMix64 on Python integers, and the constants that all backends' versions of the noise share.

The results are the same on every device. Torch-free.
"""

from __future__ import annotations

import math

WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

LN2, SQRT_HALF = math.log(2.0), math.sqrt(0.5)
LOG_SERIES = tuple(2.0 / odd for odd in (1, 3, 5, 7, 9, 11, 13))
"""log((1 + s) / (1 - s)) in odd powers of s; with |s| < 0.172 the rest is below 1e-11 of the result."""
EXP_SERIES = tuple(1.0 / math.factorial(power) for power in range(11))
"""exp(r) in powers of r; with |r| < 0.35 the rest is below 1e-12."""

WEIGHT_BITS = 43
"""Number of binary places of a token's weight. The sum of 2**19 tokens of weight 1 still fits into an int64."""
WEIGHT_HALVINGS = WEIGHT_BITS + 2
"""Number of halvings after which a weight is 0."""


def signed(word: int) -> int:
    """Returns the int64 with these 64 bits."""
    word &= WORD
    return word - (1 << 64) if word >> 63 else word


def mix_word(word: int) -> int:
    """SplitMix64's finaliser: every input bit changes every output bit with probability 1/2."""
    word &= WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def fork_seed(seed: int, fork: int) -> int:
    """Returns the seed of one of a request's continuations. Number 0 has the seed of the request."""
    assert fork >= 0
    return signed(seed if fork == 0 else mix_word(mix_word(seed) ^ mix_word(GAMMA * fork)))


def row_key(seed: int, position: int) -> int:
    """Returns the key of one row's noise, as an int64."""
    return signed(mix_word(mix_word(seed) + GAMMA * (position + 1)))
