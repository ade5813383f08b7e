"""How many pages each arena gets from a budget of bytes."""

from __future__ import annotations

import os

import torch

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.kv.layout import KVLayout

DEFAULT_CPU_BYTES = 2 << 30
SHARE_OF_FREE_MEMORY = 0.4
"""On a CPU the KV cache takes at most this share of what is free: others live there too."""


def kv_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    """Memory for KV, after the weights are loaded."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - config.gpu_memory_utilization)))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(DEFAULT_CPU_BYTES, int(free * SHARE_OF_FREE_MEMORY))


def arena_pages(layout: KVLayout, tokens: int) -> tuple[int, ...]:
    """Pages of each arena that hold so many tokens in every group; one more is the sink."""
    pages = [1] * len(layout.arena_page_bytes)
    for group, spec in enumerate(layout.groups):
        pages[layout.arena_of[group]] += -(-tokens // spec.page_tokens)
    return tuple(pages)


def total_bytes(layout: KVLayout, pages: tuple[int, ...]) -> int:
    return sum(count * size for count, size in zip(pages, layout.arena_page_bytes, strict=True))


def tokens_that_fit(layout: KVLayout, budget_bytes: int, most_tokens: int) -> int:
    """The most tokens, at most `most_tokens`, whose pages fit into the budget."""
    low, high = 0, most_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if total_bytes(layout, arena_pages(layout, middle)) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    if low < 1:
        raise ConfigError(
            f"{budget_bytes:,} bytes for KV do not hold a single page of each group; raise kv_cache_memory_bytes"
        )
    return low
