"""The most pages that one sequence can need, which admission and the division of memory go by."""

from __future__ import annotations

from bisect import bisect_right

from outrider.errors import AdmissionError
from outrider.kv.intervals import page_count
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.retention import keeps_ends, most_behind


def worst_case_pages(layout: KVLayout, config: KVConfig, total_tokens: int, k: int, *, draft: bool) -> list[int]:
    """Returns the most pages per arena that a sequence could hold at once, running alone.

    Counted per group: its length, or its window and the largest step; scratch; what a step in flight keeps
    of the step before it; one page at the ragged front; and the source of a copy.
    """
    footprint, ahead = layout.footprint, config.steps_ahead
    step = max(config.step_tokens, 1 + k)
    scratch = footprint.scratch_ahead(k) + footprint.durable_lead
    pages = [0] * len(layout.arena_page_bytes)
    for g in range(len(layout.groups) if draft else layout.num_target):
        spec = layout.groups[g]
        extra = scratch if g >= layout.num_target else 0
        length = total_tokens + extra
        behind = most_behind(layout, config.retention, g)
        resident = spec.kind.resident_tokens(length, step * ahead, behind + extra)
        freed_late = page_count(step, spec.page_tokens) if ahead > 1 else 0
        held = page_count(resident, spec.page_tokens) + 1 + freed_late
        pages[layout.arena_of[g]] += min(page_count(length, spec.page_tokens), held) + 1
    return pages


def resident_pages(layout: KVLayout, config: KVConfig, length: int) -> list[int]:
    """Returns the pages that a sequence of this length holds at once while it is computed, per target group."""
    pages = []
    for g, spec in enumerate(layout.target):
        behind = most_behind(layout, config.retention, g)
        pages.append(page_count(spec.kind.resident_tokens(length, config.step_tokens, behind), spec.page_tokens))
    return pages


def decoding_pages(layout: KVLayout, config: KVConfig, length: int, k: int) -> list[int]:
    """Returns the most pages that a sequence of this length holds while it decodes k drafts a step, per group."""
    footprint, ahead = layout.footprint, config.steps_ahead * (1 + k)
    ends, held = keeps_ends(layout, config.retention), []
    for g, spec in enumerate(layout.groups):
        extra = footprint.scratch_ahead(k) + footprint.durable_lead if g >= layout.num_target else 0
        behind = most_behind(layout, config.retention, g) if ends else 0
        resident = spec.kind.resident_tokens(length + extra, ahead + extra, behind)
        held.append(min(page_count(length + extra, spec.page_tokens), page_count(resident, spec.page_tokens) + 1))
    return held


class Sizing:
    """The longest sequences that fit into one worker's arenas."""

    def __init__(self, layout: KVLayout, config: KVConfig) -> None:
        self._layout = layout
        self._config = config
        self._longest: dict[tuple[int, bool], int] = {}

    def longest(self, k: int, *, draft: bool) -> int:
        """Returns the length of the longest sequence that could be held, running alone."""
        known = self._longest.get((k, draft))
        if known is not None:
            return known

        def too_long(total_tokens: int) -> bool:
            worst = worst_case_pages(self._layout, self._config, total_tokens, k, draft=draft)
            return any(needed > pages - 1 for needed, pages in zip(worst, self._config.arena_pages, strict=True))

        longest = bisect_right(range(self._config.max_model_len + 1), False, key=too_long) - 1
        self._longest[k, draft] = longest
        return longest

    def check(self, id: str, total_tokens: int, k: int) -> None:
        """Refuse a sequence whose target groups could never be held."""
        if total_tokens <= self.longest(k, draft=False):
            return
        layout, arena_pages = self._layout, self._config.arena_pages
        worst = worst_case_pages(layout, self._config, total_tokens, k, draft=False)
        for arena, (needed, pages) in enumerate(zip(worst, arena_pages, strict=True)):
            if needed > pages - 1:
                raise AdmissionError(
                    f"request {id!r} may grow to {total_tokens} tokens and needs up to {needed} pages of arena "
                    f"{arena} ({layout.arena_page_bytes[arena]} bytes each), which has {pages - 1}; shorten the "
                    "prompt, lower max_tokens, or give the KV cache more memory"
                )
