"""How many pages each arena gets from a budget of bytes.

Groups whose pages have equal bytes share an arena and need not be told apart here. Between arenas memory is divided
as if it were full of texts of one length; but none gets less than the longest text needs that may run alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

from outrider.backends.base import Backend
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.retention import RetentionMask
from outrider.kv.sizing import worst_case_pages

USUAL_TEXT_TOKENS = 4096
"""Length of text for which memory is divided between arenas. With longer texts, an arena that holds only windows would
be too small for many short ones."""


def kv_budget_bytes(config: EngineConfig, backend: Backend) -> int:
    """Returns the memory for KV, after the weights are loaded."""
    if config.kv_cache_memory_bytes is None:
        return backend.free_kv_bytes(config.gpu_memory_utilization)
    backend.check_kv_bytes(config.kv_cache_memory_bytes)
    return config.kv_cache_memory_bytes


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
    """Pages of each arena for so many tokens of texts, none less than `least`; one more is the null page."""
    length = min(USUAL_TEXT_TOKENS, config.max_model_len)
    pages = [1] * len(layout.arena_page_bytes)
    for group, spec in enumerate(layout.groups):
        kept = kept_tokens(layout, config, group, length)
        pages[layout.arena_of[group]] += -(-tokens * kept // (length * spec.page_tokens))
    return tuple(map(max, pages, least))


def least_pages(layout: KVLayout, config: KVConfig, length: int, k: int) -> tuple[int, ...]:
    """Pages of each arena, the null page included, in which a text of this length can run alone."""
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
