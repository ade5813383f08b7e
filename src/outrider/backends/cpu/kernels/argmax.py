"""The argmax of each row of logits, which is the token that a greedy request takes.

The first of equal numbers wins, and NaN is larger than any number, as in NumPy.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.backends.cpu.kernels.compiling import OPTIONS, Kernel
from outrider.backends.cpu.kernels.jobs import OWN, word
from outrider.backends.cpu.kernels.memory import load_f32, store_f32, store_i64
from outrider.backends.cpu.kernels.probability import largest_probability
from outrider.backends.cpu.kernels.vector import FLOAT32, LANES, fma, largest, load, maximum, splat, total

X, X_STRIDE, K, OUT, PROBABILITIES = range(OWN, OWN + 5)
"""Words of the job; a chunk is a row. OUT has two words for each row: the index, then two float32, the largest logit
and, if PROBABILITIES is not 0, its softmax probability."""
OUT_WORDS = 2

_BLOCK = 64 * LANES
_ZERO, _LOWEST = np.float32(0.0), np.float32(-np.inf)


@njit(**OPTIONS)
def _search(row, first, end):
    """Returns the index of the largest number in [first, end), by comparing every element."""
    found, most = first, load_f32(row + 4 * first)
    for at in range(first + 1, end):
        value = load_f32(row + 4 * at)
        if most != most:
            break
        if value > most or value != value:
            found, most = at, value
    return found


@njit(**OPTIONS)
def _find(row, count):
    """Returns the index of a row's largest number. A pass over vectors finds the block that contains it, and whether
    all numbers are finite."""
    zero, odd = splat(_ZERO), splat(_ZERO)
    place, best = 0, _LOWEST
    whole = count - count % _BLOCK
    for first in range(0, whole, _BLOCK):
        a = b = c = d = splat(_LOWEST)
        for at in range(row + 4 * first, row + 4 * (first + _BLOCK), 16 * LANES):
            one, two = load(at), load(at + 4 * LANES)
            three, four = load(at + 8 * LANES), load(at + 12 * LANES)
            a, b, c, d = maximum(one, a), maximum(two, b), maximum(three, c), maximum(four, d)
            # A finite number times zero adds zero; NaN and infinities leave NaN.
            odd = fma(four, zero, fma(three, zero, fma(two, zero, fma(one, zero, odd))))
        most = largest(maximum(maximum(a, b), maximum(c, d)))
        if most > best:
            place, best = first, most
    trace = total(odd)
    if trace != trace:
        return _search(row, 0, count)
    found = _search(row, place, min(place + _BLOCK, count))
    if whole < count:
        rest = _search(row, whole, count)
        value = load_f32(row + 4 * rest)
        if value > load_f32(row + 4 * found) or value != value:
            found = rest
    return found


def argmax(job, chunk, scratch):
    row = word(job, X) + chunk * word(job, X_STRIDE)
    found = _find(row, word(job, K))
    out = word(job, OUT) + 8 * OUT_WORDS * chunk
    store_i64(out, found)
    store_f32(out + 8, load_f32(row + 4 * found))
    if word(job, PROBABILITIES) != 0:
        store_f32(out + 12, largest_probability(row, word(job, K)))


ARGMAX = Kernel(argmax, FLOAT32)
