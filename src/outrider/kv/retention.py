"""Which cached pages are worth keeping once their sequence has moved on: one mask, for every tier.

A hit ends where every target group holds what it needs. Groups that read everything hold everything. A group with
a window keeps what lay under the window at certain ends, the boundaries, which are multiples of the alignment:

    dense       every boundary
    tail        ends only: of a prompt, of a prefix that turns out to be shared, of a sequence as it leaves
    N           every N tokens, and ends

    boundary                               b
    kept for it     [b - W + 1 - margin -- b)         GroupKind.needed, which the hit search asks too

Where the target keeps everything, hits may end anywhere, and a drafter's groups keep everything too.
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
"""Longer than any text."""
Marks = tuple[int, ...]
"""Boundaries of one sequence that its policy would not keep by itself, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """A policy, independent of any layout."""

    every: int | None
    """Boundaries this many tokens apart; 1: every boundary there is; None: none but ends."""

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
        """From a setting: a name, or an interval in tokens as a number or as digits."""
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
    """Must the ends of sequences be kept one by one, since not every boundary is?"""
    slides = any(spec.kind.freed_at(0) is not None for spec in layout.groups)
    return slides and (retention.every is None or retention.every > layout.alignment)


def most_behind(layout: KVLayout, retention: Retention) -> int:
    """Positions that a sequence may have to hold behind a window, for rows that run again and for its end."""
    return layout.margin + (layout.alignment - 1 if keeps_ends(layout, retention) else 0)


class RetentionMask:
    """One policy applied to one layout. A device and each further tier have one."""

    def __init__(self, layout: KVLayout, retention: Retention) -> None:
        self._alignment = alignment = layout.alignment
        self._margin = layout.margin
        self._kinds = [spec.kind for spec in layout.groups]
        self._sizes = [spec.page_tokens for spec in layout.groups]
        self.every = None if retention.every is None else -(-retention.every // alignment) * alignment
        """The policy's own boundaries are multiples of this; None: it has none."""
        self.keeps_ends = keeps_ends(layout, retention)
        target = tuple(map(self._needs_all, layout.target_groups))
        # Where a hit may end anywhere, a drafter's context is worth keeping everywhere.
        draft = tuple(all(target) or self._needs_all(group) for group in layout.draft_groups)
        self.keeps_all = target + draft
        """Per group: every full page is worth keeping, so that nobody has to ask."""

    def _needs_all(self, group: int) -> bool:
        """Do the policy's boundaries ask for every page?"""
        if self._kinds[group].freed_at(0) is None:
            return True
        if self.every is None:
            return False
        # One period further on, where the start of the sequence no longer makes needs shorter.
        stop = 2 * lcm(self.every, self._sizes[group]) // self._sizes[group]
        return sum(last - first for first, last in self._runs(group, 0, stop, ())) == stop

    # ---- ends --------------------------------------------------------------------------------------

    def boundary(self, end: int) -> int:
        """The last place, at or before `end`, where a hit can be kept for."""
        return end // self._alignment * self._alignment

    def marks(self, *ends: int) -> Marks:
        """The boundaries of these ends."""
        return tuple(sorted({self.boundary(end) for end in ends} - {0}))

    def held_from(self, group: int, end: int, margin: int) -> int:
        """The first position that a sequence committed to `end` must hold: for work to go on, whose rows may begin
        `margin` positions earlier, and for its end to be kept should it leave now."""
        kind = self._kinds[group]
        start = kind.needed(end, margin).start
        return min(start, kind.needed(self.boundary(end), self._margin).start) if self.keeps_ends else start

    def freed_at(self, group: int, end: int, margin: int) -> int | None:
        """The first committed end at which nothing below position `end` must be held; None if that never comes."""
        freed_at = self._kinds[group].freed_at(end)
        if freed_at is None:
            return None
        if self.keeps_ends:
            return max(freed_at + margin, -(-(freed_at + self._margin) // self._alignment) * self._alignment)
        return freed_at + margin

    # ---- the mask ----------------------------------------------------------------------------------

    def keeps(self, group: int, page_number: int, marks: Marks) -> bool:
        """Is this full page worth keeping?"""
        return any(True for _ in self.runs(group, page_number, page_number + 1, marks))

    def runs(self, group: int, first: int, stop: int, marks: Marks) -> Iterable[tuple[int, int]]:
        """Of the full pages [first, stop) those worth keeping, as runs [from, to) of page numbers, in order."""
        return [(first, stop)] if self.keeps_all[group] else self._runs(group, first, stop, marks)

    def _runs(self, group: int, first: int, stop: int, marks: Marks) -> Iterator[tuple[int, int]]:
        """The nearest boundary past a page's start asks for the most of it, so each page is asked about once."""
        kind, size, margin, done = self._kinds[group], self._sizes[group], self._margin, first
        for boundary in self._boundaries(first * size, (stop - 1) * size, marks):
            start = max(done, kind.needed(boundary, margin).start // size)
            done = min(stop, -(-boundary // size))
            if start < done:
                yield (start, done)

    def _boundaries(self, position: int, last: int, marks: Marks) -> Iterator[int]:
        """The nearest boundary past `position`, the one after it, … up to the first one past `last`."""
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
