"""Which pages ought to be kept, and which may be: the rule of docs/architecture.md, boundary by boundary.

Written apart from outrider.kv.retention, so that the two can be compared. What a target group must keep and what it
may keep are the same. A draft group must keep what a hit may need that the target's pages can serve; it may keep a
little more, since the mask works with a margin instead of a list of hits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import lcm

from outrider.kv.intervals import pages_under
from outrider.kv.layout import KVLayout
from outrider.kv.retention import Retention

FAR = 1 << 16
"""No boundary further from a page than this is looked at; windows of simulations and tests are shorter."""

Ends = tuple[int, ...]
"""Ends of one sequence, for which pages are kept whatever the policy's interval is."""
Rule = Callable[[int, int, Ends], bool]
"""A function of group, page number and ends of the sequence that says whether the rule covers the page."""


class ExpectedKept:
    """What one policy keeps in one layout."""

    def __init__(self, layout: KVLayout, retention: Retention) -> None:
        self._layout = layout
        self._every = retention.every
        # Under a window of 1 a hit needs nothing, wherever it ends.
        self._limiting = [g for g in layout.target_groups if self._window(g) > 1]
        self.asks_for_ends = any(self._window(group) for group in range(len(layout.groups)))
        """Whether ends matter, on the device or in a tier behind it."""
        self._known: dict[tuple[Rule, int, int, Ends], bool] = {}

    def may_keep(self, group: int, number: int, ends: Ends) -> bool:
        """Whether the page may be in the index."""
        return self._look_up(self._may_keep, group, number, ends)

    def must_keep(self, group: int, number: int, ends: Ends) -> bool:
        """Whether a hit that the policy promises needs a slot of the page."""
        return self._look_up(self._must_keep, group, number, ends)

    def _look_up(self, rule: Rule, group: int, number: int, ends: Ends) -> bool:
        known = self._known.get((rule, group, number, ends))
        if known is None:
            known = self._known[rule, group, number, ends] = rule(group, number, ends)
        return known

    def _may_keep(self, group: int, number: int, ends: Ends) -> bool:
        if self.keeps_whole(group):
            return True
        margin = expected_margin(self._layout, group)
        return self._under_a_boundary(group, number, ends, margin)

    def _must_keep(self, group: int, number: int, ends: Ends) -> bool:
        if self.keeps_whole(group):
            return True
        if group < self._layout.num_target:
            return self._under_a_boundary(group, number, ends, self._layout.margin)
        spec, reach = self._layout.groups[group], self._layout.footprint.token_reach
        first, stop = number * spec.page_tokens, (number + 1) * spec.page_tokens
        # A run of draft slots ends at the hit, or up to the reach before it.
        return any(
            spec.kind.needed(hit - before).start < stop and first < hit - before
            for hit in range(first + 1, stop + self._window(group) + reach)
            for before in range(min(reach, hit) + 1)
            if self._target_can_hit(hit, ends)
        )

    def keeps_whole(self, group: int) -> bool:
        """Whether every page of the group is kept, as a drafter's pages are where hits may end anywhere."""
        return not self._window(group) or (group >= self._layout.num_target and self._hits_anywhere)

    def _window(self, group: int) -> int:
        """Returns the group's window, or 0 if it reads everything."""
        return self._layout.groups[group].kind.freed_at(1) or 0

    def _target_can_hit(self, end: int, ends: Ends) -> bool:
        """Whether every target group keeps what a hit at `end` needs."""
        groups = self._layout.groups
        return all(
            self.must_keep(group, number, ends)
            for group in self._limiting
            for number in pages_under(groups[group].kind.needed(end), groups[group].page_tokens)
        )

    @cached_property
    def _hits_anywhere(self) -> bool:
        """Whether the target keeps every page that a hit may need."""
        layout = self._layout
        sizes = {group: layout.groups[group].page_tokens for group in self._limiting}
        period = 2 * lcm(layout.alignment * -(-(self._every or 1) // layout.alignment), *sizes.values())
        return all(
            self.must_keep(group, number, ()) for group, size in sizes.items() for number in range(period // size)
        )

    def _under_a_boundary(self, group: int, number: int, ends: Ends, margin: int) -> bool:
        """Whether a hit at a boundary, or within the margin before one, needs a slot of this page."""
        layout, spec = self._layout, self._layout.groups[group]
        first, stop = number * spec.page_tokens, (number + 1) * spec.page_tokens
        farthest = min(stop + margin + self._window(group), stop + FAR)
        boundary = first // layout.alignment * layout.alignment + layout.alignment
        while boundary <= farthest:
            if self._is_boundary(boundary, ends) and spec.kind.needed(boundary, margin).start < stop:
                return True
            boundary += layout.alignment
        return False

    def _is_boundary(self, position: int, ends: Ends) -> bool:
        """Whether the position, a multiple of the alignment, is the first at or past a multiple of the interval, or the
        boundary of an end."""
        alignment = self._layout.alignment
        if any(end // alignment * alignment == position for end in ends):
            return True
        if self._every is None:
            return False
        blocks = -(-self._every // alignment)
        return (position // alignment) % blocks == 0


def expected_margin(layout: KVLayout, group: int) -> int:
    """Most positions that a group keeps under a boundary, and may hold for one, beyond its window."""
    windows = {g: spec.kind.freed_at(1) for g, spec in enumerate(layout.groups)}
    sliding = [(window, layout.groups[g].page_tokens) for g in layout.target_groups if (window := windows[g] or 0) > 1]
    own = windows[group]
    if group < layout.num_target or own is None or not sliding:
        return layout.margin
    shortest, largest_page = min(window for window, _page in sliding), max(page for _window, page in sliding)
    return layout.margin + max(own, shortest) - own + largest_page + layout.footprint.token_reach
