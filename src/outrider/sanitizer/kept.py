"""Which pages ought to be kept: the rule of docs/architecture.md, boundary by boundary.

Written apart from outrider.kv.retention, so that the two can be compared.
"""

from __future__ import annotations

from functools import cached_property
from math import lcm

from outrider.kv.layout import KVLayout
from outrider.kv.retention import Retention

FAR = 1 << 16
"""No boundary further from a page than this is looked at; windows of simulations and tests are shorter."""


class ExpectedKept:
    """One policy over one layout."""

    def __init__(self, layout: KVLayout, retention: Retention) -> None:
        self._layout = layout
        self._every = retention.every
        self.asks_for_ends = any(spec.kind.freed_at(0) is not None for spec in layout.groups)
        """Ends matter: on the device, or in a tier behind it."""
        self._known: dict[tuple[int, int, tuple[int, ...]], bool] = {}

    def _is_boundary(self, position: int, ends: tuple[int, ...]) -> bool:
        """Multiples of the alignment: the first at or past each multiple of the interval, and those of ends."""
        alignment = self._layout.alignment
        if any(end // alignment * alignment == position for end in ends):
            return True
        if self._every is None:
            return False
        blocks = -(-self._every // alignment)
        return (position // alignment) % blocks == 0

    def keeps(self, group: int, number: int, ends: tuple[int, ...]) -> bool:
        """Does any hit at a boundary, or within the margin before one, need a slot of this page?"""
        known = self._known.get((group, number, ends))
        if known is None:
            known = self._known[group, number, ends] = self._keeps(group, number, ends)
        return known

    def _keeps(self, group: int, number: int, ends: tuple[int, ...]) -> bool:
        return (group >= self._layout.num_target and self._anywhere) or self.is_needed(group, number, ends)

    @cached_property
    def _anywhere(self) -> bool:
        """Hits may end anywhere, since the target keeps every page: so must a drafter, or it would lose its context."""
        layout = self._layout
        sizes = [layout.groups[group].page_tokens for group in layout.target_groups]
        period = 2 * lcm(layout.alignment * -(-(self._every or 1) // layout.alignment), *sizes)
        return all(
            self.is_needed(group, number, ())
            for group, size in zip(layout.target_groups, sizes, strict=True)
            for number in range(period // size)
        )

    def is_needed(self, group: int, number: int, ends: tuple[int, ...]) -> bool:
        """The same of this group alone, whatever others keep."""
        layout, spec = self._layout, self._layout.groups[group]
        if spec.kind.needed(FAR).start == 0:
            return True
        first, stop = number * spec.page_tokens, (number + 1) * spec.page_tokens
        farthest = min(stop + layout.margin + spec.kind.resident_tokens(1 << 30, 0, layout.margin), stop + FAR)
        boundary = first // layout.alignment * layout.alignment + layout.alignment
        while boundary <= farthest:
            if self._is_boundary(boundary, ends) and spec.kind.needed(boundary, layout.margin).start < stop:
                return True
            boundary += layout.alignment
        return False
