"""Jobs: the arguments of a kernel in a block of 64-bit words that every thread reads.

The first words are the same for all kernels; each kernel names its own words in its file.
"""

from __future__ import annotations

from numba import njit

from outrider.backends.cpu.kernels.memory import load_i64, store_i64

KERNEL, CHUNKS, SCRATCH, SCRATCH_BYTES, OWN = range(5)
"""Indices of: the address of the kernel; the number of chunks; the address of the threads' scratch memory; the scratch
bytes of each thread; the kernel's first own word."""
WORDS = 64


@njit(inline="always")
def word(job, number):
    return load_i64(job + 8 * number)


@njit(inline="always")
def set_word(job, number, value):
    store_i64(job + 8 * number, value)
