"""How a kernel's work is described: a block of 64-bit words that every thread reads.

The first words are the same for all kernels; the others are each kernel's own, named in its file.
"""

from __future__ import annotations

from numba import njit

from outrider.kernels.memory import load_i64, store_i64

KERNEL, CHUNKS, SCRATCH, SCRATCH_BYTES, OWN = range(5)
"""Address of the kernel; in how many chunks the work comes; the threads' scratch memory and how much each has; then
the first word of the kernel's own."""
WORDS = 64


@njit(inline="always")
def word(job, number):
    return load_i64(job + 8 * number)


@njit(inline="always")
def set_word(job, number, value):
    store_i64(job + 8 * number, value)
