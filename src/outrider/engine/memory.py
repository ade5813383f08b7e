"""How many pages each arena gets from a budget of bytes.

Groups whose pages have equal bytes share an arena and need not be told apart here. Between arenas memory is divided
as if it were full of texts of one length; but none gets less than the longest text needs that may run alone.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from dataclasses import replace

import torch

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.retention import RetentionMask
from outrider.kv.sizing import worst_case_pages

DEFAULT_CPU_BYTES = 2 << 30
SHARE_OF_FREE_MEMORY = 0.4
"""On a CPU the KV cache takes at most this share of what is free: others live there too."""
USUAL_TEXT_TOKENS = 4096
"""Of longer texts a window is a smaller part: an arena of windows alone would then be too small for short ones."""


def kv_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    """Memory for KV, after the weights are loaded."""
    if config.kv_cache_memory_bytes is not None:
        _check_the_machine_has(config.kv_cache_memory_bytes, device)
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - config.gpu_memory_utilization)))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(DEFAULT_CPU_BYTES, int(free * SHARE_OF_FREE_MEMORY))


def _check_the_machine_has(budget_bytes: int, device: torch.device) -> None:
    """Memory of a CPU is handed out when it is first written: too much of it would be missed only then."""
    if device.type == "cpu":
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if budget_bytes > machine_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes ({budget_bytes:,}) is more than this machine has ({machine_bytes:,} bytes); "
                "lower it"
            )


def total_bytes(layout: KVLayout, pages: tuple[int, ...]) -> int:
    return sum(count * size for count, size in zip(pages, layout.arena_page_bytes, strict=True))


def unsized(layout: KVLayout, **settings: object) -> KVConfig:
    """A configuration whose pages are still to be counted."""
    return KVConfig(arena_pages=(1 << 40,) * len(layout.arena_page_bytes), **settings)  # type: ignore[arg-type]


def kept_tokens(layout: KVLayout, config: KVConfig, group: int, length: int) -> int:
    """Positions of a text of this length that a group holds: while it runs, or cached; whichever is more."""
    spec, mask = layout.groups[group], RetentionMask(layout, config.retention)
    while_running = spec.kind.resident_tokens(length, config.step_tokens, layout.margin)
    if not config.prefix_caching:
        return while_running
    pages = mask.runs(group, 0, length // spec.page_tokens, mask.marks(length))
    cached = length if mask.keeps_all[group] else spec.page_tokens * sum(stop - first for first, stop in pages)
    return min(length, max(while_running, cached))


def arena_pages(layout: KVLayout, config: KVConfig, *, tokens: int, least: tuple[int, ...]) -> tuple[int, ...]:
    """Pages of each arena for so many tokens of texts, none less than `least`; one more is the sink."""
    length = min(USUAL_TEXT_TOKENS, config.max_model_len)
    pages = [1] * len(layout.arena_page_bytes)
    for group, spec in enumerate(layout.groups):
        kept = kept_tokens(layout, config, group, length)
        pages[layout.arena_of[group]] += -(-tokens * kept // (length * spec.page_tokens))
    return tuple(map(max, pages, least))


def least_pages(layout: KVLayout, config: KVConfig, length: int, k: int) -> tuple[int, ...]:
    """Pages of each arena, the sink included, in which a text of this length can run alone."""
    return tuple(2 if not pages else pages + 1 for pages in worst_case_pages(layout, config, length, k, draft=True))


def longest_text(layout: KVLayout, config: KVConfig, *, k: int, budget_bytes: int) -> int:
    """The longest text, at most max_model_len, that can run alone within the budget."""

    def too_long(length: int) -> bool:
        return total_bytes(layout, least_pages(layout, config, length, k)) > budget_bytes

    longest = bisect_right(range(config.max_model_len + 1), False, key=too_long) - 1
    if longest < 1:
        raise ConfigError(
            f"{budget_bytes:,} bytes for KV do not hold a single page of each group; raise kv_cache_memory_bytes"
        )
    return longest


def sized(layout: KVLayout, config: KVConfig, *, k: int, budget_bytes: int, most_tokens: int | None) -> KVConfig:
    """The configuration with as many pages as the budget allows, at most those of `most_tokens` tokens of texts."""
    least = least_pages(layout, config, config.max_model_len, k)
    if most_tokens is None:
        # A byte holds no more: a group holds at least one token, of at least one byte, of each usual text.
        most_tokens = budget_bytes * USUAL_TEXT_TOKENS

    def too_many(tokens: int) -> bool:
        return total_bytes(layout, arena_pages(layout, config, tokens=tokens, least=least)) > budget_bytes

    tokens = bisect_left(range(most_tokens + 1), True, key=too_many) - 1
    return replace(config, arena_pages=arena_pages(layout, config, tokens=max(0, tokens), least=least))


def tokens_held(layout: KVLayout, config: KVConfig) -> int:
    """How many tokens of texts the arenas hold together, running or cached."""
    none = (1,) * len(config.arena_pages)

    def too_many(tokens: int) -> bool:
        pages = arena_pages(layout, config, tokens=tokens, least=none)
        return any(needed > have for needed, have in zip(pages, config.arena_pages, strict=True))

    most = sum(config.arena_pages) * max(spec.page_tokens for spec in layout.groups)
    return bisect_left(range(most + 1), True, key=too_many) - 1
