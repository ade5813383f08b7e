"""What one step must know about KV: frozen, and only what changed.

The runner keeps page tables of its own and applies these changes to them, so the cost of a plan grows
with what moved, not with how long the sequences are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PageAssignment(NamedTuple):
    """From page number `first_page` on, the sequence's table in this group is exactly `pages`.

    `low` is the first position that is valid: the first key that a reader may use.
    """

    sequence: str
    group: int
    first_page: int
    pages: tuple[int, ...]
    low: int


class PageCopy(NamedTuple):
    """Copy slots [first, stop) of a page, before anything else in the step runs."""

    group: int
    source: int
    destination: int
    first: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KVPlan:
    step: int
    assignments: tuple[PageAssignment, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    forgotten: tuple[str, ...] = ()
    """Sequences whose tables the runner may drop; before the assignments."""


class PageTables:
    """The runner's side: page tables kept up to date from plans."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._tables: dict[str, list[list[int]]] = {}
        self._lows: dict[str, list[int]] = {}

    def apply(self, plan: KVPlan) -> None:
        for sequence in plan.forgotten:
            self._tables.pop(sequence, None)
            self._lows.pop(sequence, None)
        for change in plan.assignments:
            tables = self._tables.get(change.sequence)
            if tables is None:
                tables = self._tables[change.sequence] = [[] for _ in range(self._num_groups)]
                self._lows[change.sequence] = [0] * self._num_groups
            tables[change.group][change.first_page :] = change.pages
            self._lows[change.sequence][change.group] = change.low

    def table(self, sequence: str, group: int) -> list[int]:
        return self._tables[sequence][group]

    def low(self, sequence: str, group: int) -> int:
        return self._lows[sequence][group]

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._tables
