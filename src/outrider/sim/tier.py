"""Further tiers of the cache, as the simulation sees them: pages by key, first in, first out.

A host tier belongs to one worker and dies with it; a remote one outlives workers. Each takes over what a device
publishes, as far as its own policy keeps it, by the same mask.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.kv.layout import KVLayout
from outrider.kv.retention import Marks, Retention, RetentionMask

HOST, REMOTE = "host", "remote"


class TierPage(NamedTuple):
    values: list[bytes]
    ids: list[int]


class FakeTier:
    """Answers contains() for the hit search, and hands pages out if it still has them."""

    def __init__(self, name: str, layout: KVLayout, retention: Retention, *, share: float, capacity_pages: int) -> None:
        self.name = name
        self.retention = retention
        self.share = share
        """Of the pages it is offered and wants, those it really takes: a tier may be busy, or down."""
        self.mask = RetentionMask(layout, retention)
        self._capacity = capacity_pages
        self._pages: dict[tuple[int, bytes], TierPage] = {}
        self._last_ids: set[tuple[int, int]] = set()

    def wants(self, group: int, page_number: int, marks: Marks) -> bool:
        """Is a page that the device publishes worth keeping here too?"""
        return self.mask.keeps(group, page_number, marks)

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self._pages

    def holds_identity(self, group: int, last_slot: int) -> bool:
        """The same question as the sanitizer asks it: by identity, not by key."""
        return (group, last_slot) in self._last_ids

    def put(self, group: int, key: bytes, page: TierPage) -> None:
        if (group, key) in self._pages:
            return
        self._pages[group, key] = page
        self._last_ids.add((group, page.ids[-1]))
        while len(self._pages) > self._capacity:
            (old_group, old_key) = next(iter(self._pages))
            old = self._pages.pop((old_group, old_key))
            self._last_ids.discard((old_group, old.ids[-1]))

    def get(self, group: int, key: bytes) -> TierPage | None:
        return self._pages.get((group, key))
