"""Which cached pages are worth keeping once their sequence has moved on: one mask, for every tier.

A hit ends where every target group holds what it needs. Groups that read everything hold everything. A group with
a window keeps what lay under the window at certain ends, the boundaries, which are multiples of the alignment:

    dense       every boundary
    tail        ends only: of a prompt, of a prefix that turns out to be shared, of a sequence as it is released
    N           every N tokens, and ends

    boundary                               b
    kept for it     [b - W + 1 - margin -- b)         GroupKind.needed, which the hit search asks too

Where the target keeps everything, hits may end anywhere, and a drafter's groups keep everything too. Elsewhere a
drafter's group with a window keeps a larger margin (`kept_margins`), so that every hit finds its window whole, with one
exception: at the earliest hit that the target's pages allow, a drafter that reaches ahead may start without context,
since the tap rows that would feed its last slots read below what the target kept.
The mask holds no state of a sequence: its ends are passed in as `marks`.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from outrider.errors import ConfigError
from outrider.kv.checked import whole_number

if TYPE_CHECKING:
    from outrider.kv.layout import KVLayout

MOST_EVERY = 1 << 32
"""An interval longer than any text, in tokens."""
Marks = tuple[int, ...]
"""Boundaries of one sequence that its policy would not keep by itself, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """A retention policy, independent of any layout."""

    every: int | None
    """Distance between boundaries in tokens; 1 keeps every boundary there is, None keeps ends only."""

    def __post_init__(self) -> None:
        if self.every is not None:
            whole_number(self.every, "the interval of a retention policy, in tokens,", at_least=1)
            if self.every > MOST_EVERY:
                raise ConfigError(
                    f"kv_retention: an interval of more than {MOST_EVERY:,} tokens is longer than any text; use tail "
                    "to keep ends alone"
                )

    @classmethod
    def of(cls, given: object) -> Retention:
        """Build a policy from a setting: a name, or an interval in tokens as a number or as digits."""
        if isinstance(given, Retention):
            return given
        if isinstance(given, str) and given in NAMED:
            return NAMED[given]
        if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 100:
            given = int(given)
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return cls(every=given)
        raise ConfigError(
            f"kv_retention must be {', '.join(NAMED)}, or an interval in tokens such as 1024; got {reprlib.repr(given)}"
        )

    @property
    def label(self) -> str:
        return next((name for name, policy in NAMED.items() if policy == self), f"every {self.every} tokens, and ends")


DENSE = Retention(every=1)
TAIL = Retention(every=None)
NAMED = {"dense": DENSE, "tail": TAIL}


def keeps_ends(layout: KVLayout, retention: Retention) -> bool:
    """Whether the ends of sequences are kept one by one, since not every boundary is."""
    slides = any(spec.kind.slides for spec in layout.groups)
    return slides and (retention.every is None or retention.every > layout.alignment)


def kept_margins(layout: KVLayout) -> tuple[int, ...]:
    """Returns the positions kept under a boundary in addition to the window that ends there, per group.

    The target's pages for a boundary also serve hits that end before it: up to a page and the margin before it, or,
    while its shortest window reaches back to the beginning, anywhere. A draft group with a window keeps enough for
    all of these hits. What the target keeps never depends on this.
    """
    limiting = limiting_windows(layout)
    margins = [layout.margin] * len(layout.groups)
    if not limiting:
        return tuple(margins)
    largest_page = max(layout.groups[group].page_tokens for group in limiting)
    for group in layout.draft_groups:
        window = layout.groups[group].kind.freed_at(1) or 0
        longer = max(0, min(limiting.values()) - window)
        margins[group] += longer + largest_page + layout.footprint.token_reach
    return tuple(margins)


def limiting_windows(layout: KVLayout) -> dict[int, int]:
    """Returns the windows of target groups that limit where a hit may end; under a window of 1 a hit needs nothing."""
    windows = {group: layout.groups[group].kind.freed_at(1) for group in layout.target_groups}
    return {group: window for group, window in windows.items() if window is not None and window > 1}


def most_behind(layout: KVLayout, retention: Retention, group: int) -> int:
    """Returns the most positions that a sequence holds behind the group's window, for tap rows and for its end."""
    if not keeps_ends(layout, retention):
        return layout.margin
    return kept_margins(layout)[group] + layout.alignment - 1


class RetentionMask:
    """A policy applied to a layout. The device has one mask, and so has each further tier."""

    def __init__(self, layout: KVLayout, retention: Retention) -> None:
        self._alignment = alignment = layout.alignment
        self._margins = kept_margins(layout)
        self._kinds = [spec.kind for spec in layout.groups]
        self._sizes = [spec.page_tokens for spec in layout.groups]
        self.every = None if retention.every is None else -(-retention.every // alignment) * alignment
        """Distance between the policy's own boundaries, a multiple of the alignment; None if it has none."""
        self.keeps_ends = keeps_ends(layout, retention)
        target = tuple(map(self._needs_all, layout.target_groups))
        # Where a hit may end anywhere, a drafter's context is worth keeping everywhere.
        hits_anywhere = all(target[group] for group in limiting_windows(layout))
        draft = tuple(hits_anywhere or self._needs_all(group) for group in layout.draft_groups)
        self.keeps_all = target + draft
        """Per group: whether every full page is worth keeping, so that no page has to be looked at."""

    def _needs_all(self, group: int) -> bool:
        """Whether the policy's boundaries ask for every page of the group."""
        if not self._kinds[group].slides:
            return True
        if self.every is None:
            return False
        # One period further on, where the start of the sequence no longer makes needs shorter.
        stop = 2 * lcm(self.every, self._sizes[group]) // self._sizes[group]
        return sum(last - first for first, last in self._runs(group, 0, stop, ())) == stop

    # ---- ends --------------------------------------------------------------------------------------

    def boundary(self, end: int) -> int:
        """Returns the last boundary at or before `end`."""
        return end // self._alignment * self._alignment

    def marks(self, *ends: int) -> Marks:
        """Returns the boundaries of these ends."""
        return tuple(sorted({self.boundary(end) for end in ends} - {0}))

    def held_from(self, group: int, end: int, margin: int) -> int:
        """Returns the first position that a sequence committed to `end` must hold: for rows to come, which may begin
        `margin` positions earlier, and for its end to be kept if it is released now."""
        kind = self._kinds[group]
        start = kind.needed(end, margin).start
        return min(start, kind.needed(self.boundary(end), self._margins[group]).start) if self.keeps_ends else start

    def freed_at(self, group: int, end: int, margin: int) -> int | None:
        """Returns the first committed end at which nothing below position `end` must be held; None if there is none."""
        freed_at = self._kinds[group].freed_at(end)
        if freed_at is None:
            return None
        if self.keeps_ends:
            return max(freed_at + margin, -(-(freed_at + self._margins[group]) // self._alignment) * self._alignment)
        return freed_at + margin

    # ---- the mask ----------------------------------------------------------------------------------

    def keeps(self, group: int, page_number: int, marks: Marks) -> bool:
        """Whether this full page is worth keeping."""
        return any(True for _ in self.runs(group, page_number, page_number + 1, marks))

    def runs(self, group: int, first: int, stop: int, marks: Marks) -> Iterable[tuple[int, int]]:
        """Returns those of the full pages [first, stop) that are worth keeping, as runs [from, to) of page numbers."""
        return [(first, stop)] if self.keeps_all[group] else self._runs(group, first, stop, marks)

    def _runs(self, group: int, first: int, stop: int, marks: Marks) -> Iterator[tuple[int, int]]:
        """Look at each page once: the nearest boundary past its start asks for the most of it."""
        kind, size, margin, done = self._kinds[group], self._sizes[group], self._margins[group], first
        for boundary in self._boundaries(first * size, (stop - 1) * size, marks):
            start = max(done, kind.needed(boundary, margin).start // size)
            done = min(stop, -(-boundary // size))
            if start < done:
                yield (start, done)

    def _boundaries(self, position: int, last: int, marks: Marks) -> Iterator[int]:
        """Yields the boundaries past `position` in order, up to the first one past `last`."""
        place, every = bisect_right(marks, position), self.every
        while position <= last:
            mark = marks[place] if place < len(marks) else None
            regular = None if every is None else (position // every + 1) * every
            if mark is not None and (regular is None or mark <= regular):
                position, place = mark, place + 1
            elif regular is not None:
                position = regular
            else:
                return
            yield position
