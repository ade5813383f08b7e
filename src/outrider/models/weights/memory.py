"""Memory for weights and for KV: one block on a CPU, in huge pages where the system has them.

Every token reads every weight once. With pages of 4 KiB a processor spends a good part of that looking up
addresses, and its prefetcher stops at every page's end.
"""

from __future__ import annotations

import ctypes
import mmap
from math import prod

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64
MADV_HUGEPAGE = 14


class WeightMemory:
    """Hands out uninitialised tensors, one after the other, from a block of known size."""

    def __init__(self, total_bytes: int, tensors: int, device: torch.device) -> None:
        self._device = device
        self._block: Tensor | None = None
        self._used = 0
        if device.type == "cpu":
            self._block = _huge_block(total_bytes + tensors * ALIGNMENT_BYTES)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._block is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        count = 1
        for size in shape:
            count *= size
        end = self._used + count * dtype.itemsize
        piece = self._block[self._used : end].view(dtype).view(shape)
        self._used = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return piece


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the system fills in a page when it is first touched: gigabytes take no time, and no memory before."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not _maps(size):
        return torch.zeros(shape, dtype=dtype, device=device)
    return _huge_block(size).view(dtype).view(shape)


def _maps(size: int) -> bool:
    return hasattr(mmap, "MAP_ANONYMOUS") and size >= HUGE_PAGE_BYTES


def _huge_block(size: int) -> Tensor:
    """Untouched memory, aligned to huge pages. The tensor keeps the mapping alive."""
    if not _maps(size):
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    skip = -tensor.data_ptr() % HUGE_PAGE_BYTES
    tensor = tensor[skip : skip + size]
    # Only advice: where it is not taken, everything works as before.
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return tensor
