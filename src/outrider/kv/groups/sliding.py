"""Sliding window: a query at p reads [p - W + 1, p]."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kv.checked import whole_number
from outrider.kv.groups.base import GroupKind, HeldPages
from outrider.kv.intervals import Interval


@dataclass(frozen=True, slots=True)
class Sliding(GroupKind):
    window: int

    def __post_init__(self) -> None:
        advice = "a query always reads its own position; use a full group for layers without a window"
        whole_number(self.window, "window", at_least=1, advice=advice)

    def needed(self, end: int, margin: int = 0) -> Interval:
        return Interval(max(0, end - self.window + 1 - margin), end)

    def longest(self, limit: int, held: HeldPages) -> int:
        """Walk down from `limit`; each gap moves the candidate to the gap's start.

        candidate        [needed ......... end)
        page j has a gap at g:    every end in (g, end] still needs a slot of that page past g,
                                  so the next candidate is g itself.
        """
        page_tokens, leading_slots = held.page_tokens, held.leading_slots
        end = limit
        while end > 0:
            needed = self.needed(end)
            if needed.empty:
                return end
            page = (end - 1) // page_tokens
            slots = leading_slots(page)
            if not slots:
                page = held.last_found(page - 1)
                end = (page + 1) * page_tokens
                continue
            if page * page_tokens + slots < end:
                end = page * page_tokens + slots
                continue
            first = needed.start // page_tokens
            page -= 1
            while page >= first and leading_slots(page) == page_tokens:
                page -= 1
            if page < first:
                return end
            end = page * page_tokens + leading_slots(page)
        return 0

    def freed_at(self, end: int) -> int | None:
        return end + self.window - 1

    def resident_tokens(self, length: int, step_tokens: int, margin: int) -> int:
        return min(length, self.window - 1 + margin + step_tokens)

    @property
    def slides(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"sliding:{self.window}"
