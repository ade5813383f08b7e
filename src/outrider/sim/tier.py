"""A second tier of the cache, as the simulation sees it: pages by key, first in, first out."""

from __future__ import annotations

from typing import NamedTuple


class TierPage(NamedTuple):
    values: list[bytes]
    ids: list[int]


class FakeTier:
    """Answers contains() for the hit search, and hands pages out if it still has them."""

    def __init__(self, capacity_pages: int) -> None:
        self._capacity = capacity_pages
        self._pages: dict[tuple[int, bytes], TierPage] = {}
        self._last_ids: set[tuple[int, int]] = set()

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
