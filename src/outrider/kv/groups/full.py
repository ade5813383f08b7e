"""Full attention: a query reads every earlier position."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kv.groups.base import GroupKind, HeldPages
from outrider.kv.intervals import Interval


@dataclass(frozen=True, slots=True)
class Full(GroupKind):
    def needed(self, end: int, margin: int = 0) -> Interval:
        return Interval(0, end)

    def longest(self, limit: int, held: HeldPages) -> int:
        # Everything from 0 is needed, so walk up to the first page that is not whole.
        size = held.page_tokens
        whole = held.whole_prefix(limit // size)
        if whole * size >= limit:
            return limit
        return min(limit, whole * size + held.leading_slots(whole))

    def freed_at(self, end: int) -> int | None:
        return None

    def resident_tokens(self, length: int, step_tokens: int, margin: int) -> int:
        return length

    @property
    def slides(self) -> bool:
        return False

    @property
    def label(self) -> str:
        return "full"
