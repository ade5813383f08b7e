"""I13: what is announced to routers is what can serve a hit: the rule, text by text and slot by slot.

Written apart from outrider.events.servable, so that the two can be compared. A page can serve a hit if there is a text
and an end of it, at the end of a block, at which every target group holds what it needs, a part of the page among it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from outrider.errors import InvariantViolation
from outrider.kv.intervals import pages_under
from outrider.kv.layout import KVLayout


class _Published(NamedTuple):
    group: int
    key: bytes
    hashes: Sequence[int]
    """Identities of the slots of its text, which may grow."""
    number: int


class ExpectedAnnounced:
    """Which of the published pages ought to be announced."""

    def __init__(self, layout: KVLayout, divisible: Sequence[dict[int, int]]) -> None:
        self._layout = layout
        self._divisible = divisible
        self._published: dict[tuple[int, int], _Published] = {}
        """By arena and page."""

    def published(self, group: int, page: int, key: bytes, hashes: Sequence[int], number: int) -> None:
        if group < self._layout.num_target:
            self._published[self._layout.arena_of[group], page] = _Published(group, key, hashes, number)

    def evicted(self, arena: int, page: int) -> None:
        self._published.pop((arena, page), None)

    def clear(self) -> None:
        self._published.clear()

    def check(self, announced: Collection[tuple[int, bytes]]) -> None:
        """Compare with what was announced, as (group, key)."""
        expected = self._expected()
        for what, pages in (
            ("a page that can serve no hit is announced to routers", set(announced) - expected),
            ("a page that can serve a hit is not announced to routers", expected - set(announced)),
        ):
            if pages:
                group, key = min(pages)
                where = next((f", page number {p.number}" for p in self._published.values() if p.key == key), "")
                raise InvariantViolation("I13", f"I13 broken: {what} [group {group}{where}, key {key.hex()[:8]}]")

    def _expected(self) -> set[tuple[int, bytes]]:
        """Returns (group, key) of every page that some hit would read now."""
        texts = {id(page.hashes): page.hashes for page in self._published.values()}
        read: set[tuple[int, int]] = set()
        """(group, identity of the last slot) of pages that are read."""
        for hashes in texts.values():
            self._note_reads(hashes, read)
        found = set()
        for page in self._published.values():
            last = (page.number + 1) * self._layout.groups[page.group].page_tokens
            if page.hashes[last] in self._divisible[page.group] and (page.group, page.hashes[last]) in read:
                found.add((page.group, page.key))
        return found

    def _note_reads(self, hashes: Sequence[int], read: set[tuple[int, int]]) -> None:
        layout, groups = self._layout, self._layout.target_groups
        runs = {group: self._runs(group, hashes) for group in groups}
        for end in range(layout.grain, len(hashes), layout.grain):
            needs = {group: layout.groups[group].kind.needed(end) for group in groups}
            if not all(need.empty or runs[group][end] <= need.start for group, need in needs.items()):
                continue
            for group, need in needs.items():
                size = layout.groups[group].page_tokens
                for number in pages_under(need, size):
                    last = (number + 1) * size
                    if last < len(hashes):
                        read.add((group, hashes[last]))

    def _runs(self, group: int, hashes: Sequence[int]) -> list[int]:
        """Returns, for every end, the start of the run of slots that stops there and that pages without media hold."""
        held, starts = self._divisible[group], [0]
        for position in range(len(hashes) - 1):
            starts.append(starts[-1] if hashes[position + 1] in held else position + 1)
        return starts
