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
    """A tier that answers contains() for the hit search, and hands pages out as long as it has them."""

    def __init__(
        self, name: str, layout: KVLayout, retention: Retention, *, probability: float, capacity_pages: int
    ) -> None:
        self.name = name
        self.retention = retention
        self.probability = probability
        """Probability that the tier takes a page that it is offered and wants: a tier may be busy, or down."""
        self.mask = RetentionMask(layout, retention)
        self._capacity = capacity_pages
        self._pages: dict[tuple[int, bytes], TierPage] = {}
        self._last_ids: set[tuple[int, int]] = set()

    def wants(self, group: int, page_number: int, marks: Marks) -> bool:
        """Whether a page that the device publishes is worth keeping in this tier too."""
        return self.mask.keeps(group, page_number, marks)

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self._pages

    def holds_identity(self, group: int, last_slot: int) -> bool:
        """Whether the tier holds the page whose last slot has this identity; the sanitizer does not ask by key."""
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
