"""The draw on the CPU, compiled: it gives the same tokens as the reference's `draw`, without sorting.

The tokens that top_k and top_p keep are a prefix of the ranking, described by its last token, the *cut*:

    kept(i)  =  logit[i] > cut_logit  or  (logit[i] == cut_logit and i <= cut_token)

top_k finds its cut by bisection over the float32 numbers. top_p draws first and then checks whether the winner is
kept, which takes one sum: if it is not, the cut moves to just above it and the draw is repeated, so the last
winner is the best of all tokens that are kept. A repetition halves the remaining weight, on average.

The draw hashes every kept token but takes logarithms only for the few that may win: since 1 - u <= -log(u), noise
of at least z requires 1 - u <= exp(-z).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

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
)

# No fastmath: each operation is IEEE 754's, none is fused or reordered, or the reference would differ.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True}

_GAMMA, _FIRST, _SECOND = np.uint64(GAMMA), np.uint64(FIRST), np.uint64(SECOND)
_12, _27, _30, _31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)
_UNIFORM_BITS = 52
_BLOCK = 256
_NOISE_MAX = 36.0
"""Slightly less than the largest noise, which makes `_may_win` true a little more often than necessary."""
_LOG2E_BELOW = 1.44
"""Slightly less than log2(e), so that a skipped token falls short by far more than any rounding error."""
_INVERSE_LN2, _LOWEST = 1.0 / LN2, -WEIGHT_HALVINGS * LN2
_SCALES = np.array([2.0 ** (WEIGHT_BITS - n) for n in range(WEIGHT_HALVINGS + 1)])
_L, _E = LOG_SERIES, EXP_SERIES


@njit(inline="always")
def _uniform_bits(key, token):  # type: ignore[no-untyped-def]
    bits = key + np.uint64(token + 1) * _GAMMA
    bits = (bits ^ (bits >> _30)) * _FIRST
    bits = (bits ^ (bits >> _27)) * _SECOND
    return np.int64((bits ^ (bits >> _31)) >> _12)


@njit(**OPTIONS)
def _log(x):  # type: ignore[no-untyped-def]
    mantissa, exponent = math.frexp(x)
    scale = float(exponent)
    if mantissa < SQRT_HALF:
        mantissa *= 2.0
        scale -= 1.0
    s = (mantissa - 1.0) / (mantissa + 1.0)
    q = s * s
    series = (((((_L[6] * q + _L[5]) * q + _L[4]) * q + _L[3]) * q + _L[2]) * q + _L[1]) * q + _L[0]
    return scale * LN2 + s * series


@njit(**OPTIONS)
def _noise(bits):  # type: ignore[no-untyped-def]
    return -_log(-_log((float(bits) + 0.5) * 2.0**-_UNIFORM_BITS))


@njit(inline="always")
def _weight(y):  # type: ignore[no-untyped-def]
    y = y if y > _LOWEST else _LOWEST
    halvings = np.floor(y * _INVERSE_LN2 + 0.5)
    r = y - halvings * LN2
    power = ((((_E[10] * r + _E[9]) * r + _E[8]) * r + _E[7]) * r + _E[6]) * r + _E[5]
    power = ((((power * r + _E[4]) * r + _E[3]) * r + _E[2]) * r + _E[1]) * r + _E[0]
    return np.int64(power * _SCALES[np.int64(-halvings)])


@njit(inline="always")
def _flip(bits):  # type: ignore[no-untyped-def]
    """Maps the bits of a float32 to an integer of the same order, and back: it is its own inverse."""
    return bits ^ 0x7FFFFFFF if bits < 0 else bits


@njit(inline="always")
def _kept(logit, token, cut_logit, cut_token):  # type: ignore[no-untyped-def]
    return (logit > cut_logit) | ((logit == cut_logit) & (token <= cut_token))


@njit(inline="always")
def _at_least(logits, level):  # type: ignore[no-untyped-def]
    """Returns the number of logits that are at least `level`."""
    count = np.int64(0)
    for i in range(logits.size):
        count += np.int64(logits[i] >= level)
    return count


@njit(**OPTIONS)
def _top_k_cut(logits, largest, top_k):  # type: ignore[no-untyped-def]
    value = np.empty(1, dtype=np.float32)
    bits = value.view(np.int32)
    value[0] = -np.inf
    low = np.int64(_flip(np.int64(bits[0])))
    value[0] = logits[largest]
    high = np.int64(_flip(np.int64(bits[0])))
    # The largest number that at least top_k logits reach: the logit of rank top_k - 1.
    while low < high:
        middle = (low + high + 1) >> 1
        bits[0] = np.int32(_flip(middle))
        reached = _at_least(logits, value[0])
        if reached >= top_k:
            low = middle
            if reached == top_k:
                break
        else:
            high = middle - 1
    bits[0] = np.int32(_flip(low))
    level = value[0]
    better = np.int64(0)
    for i in range(logits.size):
        better += logits[i] > level
    # Of the tokens with exactly this logit, those with the lowest ids fill the remaining ranks.
    token = np.int64(-1)
    if level > -np.inf:
        while better < top_k and token + 1 < logits.size:
            token += 1
            better += logits[token] == level
    return level, token


@njit(inline="always")
def _may_win(missing, bits):  # type: ignore[no-untyped-def]
    """Returns whether the noise may be at least `missing`: always true where it is, rarely true where it is not."""
    missing = missing if missing > 0.0 else 0.0  # unlike min and max, compiles to vector instructions
    missing = missing if missing < _NOISE_MAX else _NOISE_MAX
    halvings = np.int64(missing * _LOG2E_BELOW)
    return (np.int64(1) << _UNIFORM_BITS) - bits <= (np.int64(1) << (_UNIFORM_BITS - halvings))


# The two functions below go block by block. A first loop without branches, which compiles to vector instructions,
# checks whether a block has any candidates; few blocks do.


@njit(**OPTIONS)
def _winner(logits, largest, temperature, log_min_p, cut_logit, cut_token, key):  # type: ignore[no-untyped-def]
    top = float(logits[largest])
    winner = largest
    best = _noise(_uniform_bits(key, largest))
    for start in range(0, logits.size, _BLOCK):
        block = logits[start : start + _BLOCK]
        if _at_least(block, cut_logit) == 0:
            continue
        candidates = np.int64(0)
        for i in range(block.size):
            y = (float(block[i]) - top) / temperature
            candidates += np.int64(_may_win(best - y, _uniform_bits(key, start + i)))
        if candidates == 0:
            continue
        for i in range(block.size):
            token = start + i
            y = (float(block[i]) - top) / temperature
            bits = _uniform_bits(key, token)
            if _kept(block[i], token, cut_logit, cut_token) and y >= log_min_p and _may_win(best - y, bits):
                score = y + _noise(bits)
                if score > best or (score == best and token < winner):
                    best = score
                    winner = token
    return winner


@njit(**OPTIONS)
def _kept_weight(logits, largest, temperature, log_min_p, cut_logit, cut_token):  # type: ignore[no-untyped-def]
    top = float(logits[largest])
    total = np.int64(0)
    for start in range(0, logits.size, _BLOCK):
        # A slice counted from 0, because an index that might be negative keeps loops from becoming vector code.
        block = logits[start : start + _BLOCK]
        if _at_least(block, cut_logit) > 0:
            for i in range(block.size):
                y = (float(block[i]) - top) / temperature
                kept = _kept(block[i], start + i, cut_logit, cut_token) & (y >= log_min_p)
                total += _weight(y) * np.int64(kept)
    return total


@njit(**OPTIONS)
def _draw_row(logits, largest, temperature, log_min_p, top_k, top_p, key):  # type: ignore[no-untyped-def]
    # A token id of -1 in the cut excludes every token whose logit is -inf.
    cut_logit, cut_token = np.float32(-np.inf), np.int64(-1)
    if 0 < top_k < logits.size:
        cut_logit, cut_token = _top_k_cut(logits, largest, top_k)
    if top_p == 1.0:
        return _winner(logits, largest, temperature, log_min_p, cut_logit, cut_token, key)
    total = _kept_weight(logits, largest, temperature, log_min_p, cut_logit, cut_token)
    limit = np.int64(math.ceil(float(total) * top_p))
    while True:
        winner = _winner(logits, largest, temperature, log_min_p, cut_logit, cut_token, key)
        cut_logit, cut_token = logits[winner], np.int64(winner - 1)
        if _kept_weight(logits, largest, temperature, log_min_p, cut_logit, cut_token) < limit:
            return winner


@njit(
    "void(float32[:, ::1], int64[::1], float64[::1], float64[::1], int64[::1], float64[::1], uint64[::1], int64[::1])",
    **OPTIONS,
)
def _draw_rows(logits, largest, temperature, log_min_p, top_k, top_p, key, tokens):  # type: ignore[no-untyped-def]
    for i in range(tokens.size):
        tokens[i] = _draw_row(logits[i], largest[i], temperature[i], log_min_p[i], top_k[i], top_p[i], key[i])


def draw_cpu(
    logits: NDArray[np.float32],
    *,
    temperature: NDArray[np.float64],
    log_min_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    key: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Returns one token id for each row. The arguments are those of `DrawSettings`."""
    tokens = np.empty(len(logits), dtype=np.int64)
    logits = np.ascontiguousarray(logits)
    _draw_rows(logits, logits.argmax(axis=-1), temperature, log_min_p, top_k, top_p, key.view(np.uint64), tokens)
    return tokens
