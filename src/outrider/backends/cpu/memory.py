"""Memory for weights and for KV, in huge pages where the system has them, and scratch memory.

Every token reads every weight once. With memory pages of 4 KiB, a good part of that time goes into TLB misses, and the
hardware prefetcher stops at the end of every page.
"""

from __future__ import annotations

import ctypes
import mmap
from math import prod

import torch
from torch import Tensor

from outrider.models.weight_forms import WeightMemory

HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64
MADV_HUGEPAGE = 14


class HugePageMemory(WeightMemory):
    """Allocates uninitialised tensors, one after the other, from a block of known size."""

    def __init__(self, total_bytes: int, tensors: int) -> None:
        self._block = _huge_block(total_bytes + tensors * ALIGNMENT_BYTES)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        end = self._used + prod(shape) * dtype.itemsize
        piece = self._block[self._used : end].view(dtype).view(shape)
        self._used = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return piece


class ScratchBuffer:
    """Scratch memory for kernels that grows to the largest size that was requested."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._size, self._address = 0, 0

    def at_least(self, size: int) -> int:
        """Returns the address of at least `size` bytes."""
        if self._size < size:
            # Zero in between: an interrupt may come at any line, and the memory at the old address is gone.
            self._size = 0
            self.tensor = torch.empty(size, dtype=torch.uint8)
            self._address = self.tensor.data_ptr()
            self._size = size
        return self._address


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeroed memory. The system allocates it when it is first touched, so gigabytes take no time, and no memory
    until they are used."""
    size = prod(shape) * dtype.itemsize
    if not _maps(size):
        return torch.zeros(shape, dtype=dtype)
    return _huge_block(size).view(dtype).view(shape)


def _maps(size: int) -> bool:
    return hasattr(mmap, "MAP_ANONYMOUS") and size >= HUGE_PAGE_BYTES


def _huge_block(size: int) -> Tensor:
    """Returns untouched memory, aligned to huge pages. The tensor keeps the mapping alive."""
    if not _maps(size):
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    skip = -tensor.data_ptr() % HUGE_PAGE_BYTES
    tensor = tensor[skip : skip + size]
    # The advice may be ignored without harm.
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return tensor
