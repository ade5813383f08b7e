"""Where the largest number of each row is: the token of a greedy draw, found by the threads that made the logits.

The lowest place of equal numbers; what is not a number is larger than any, as in NumPy.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from outrider.kernels.compiling import OPTIONS, Kernel
from outrider.kernels.jobs import OWN, word
from outrider.kernels.memory import load_f32, store_f32, store_i64
from outrider.kernels.shares import share
from outrider.kernels.vector import FLOAT32, LANES, fma, largest, load, maximum, splat, total

X, X_STRIDE, K, OUT, SHARES = range(OWN, OWN + 5)
"""A chunk is a row. OUT: for each row a word with the place, then a word of two float32: the number, and where SHARES
is not 0 its share."""
OUT_WORDS = 2

_BLOCK = 64 * LANES
_ZERO, _LOWEST = np.float32(0.0), np.float32(-np.inf)


@njit(**OPTIONS)
def _search(row, first, end):
    """Number by number: the place in [first, end)."""
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
    """A pass over vectors says in which block it is, and whether all are finite."""
    zero, odd = splat(_ZERO), splat(_ZERO)
    place, best = 0, _LOWEST
    whole = count - count % _BLOCK
    for first in range(0, whole, _BLOCK):
        a = b = c = d = splat(_LOWEST)
        for at in range(row + 4 * first, row + 4 * (first + _BLOCK), 16 * LANES):
            one, two = load(at), load(at + 4 * LANES)
            three, four = load(at + 8 * LANES), load(at + 12 * LANES)
            a, b, c, d = maximum(one, a), maximum(two, b), maximum(three, c), maximum(four, d)
            # Nothing finite leaves a trace here.
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


def greatest(job, chunk, scratch):
    row = word(job, X) + chunk * word(job, X_STRIDE)
    found = _find(row, word(job, K))
    out = word(job, OUT) + 8 * OUT_WORDS * chunk
    store_i64(out, found)
    store_f32(out + 8, load_f32(row + 4 * found))
    if word(job, SHARES) != 0:
        store_f32(out + 12, share(row, word(job, K)))


GREATEST = Kernel(greatest, FLOAT32)
