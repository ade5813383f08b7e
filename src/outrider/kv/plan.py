"""What one step must know about KV: frozen messages that hold only what changed.

A runner keeps block tables of its own and applies each plan's changes to them, so the cost of a plan grows
with what moved, not with how long the sequences are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class PageAssignment(NamedTuple):
    """A change of a block table: from page number `first_page` on, it is exactly `pages`.

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


class TableReader(Protocol):
    """Block tables as a reader sees them. Entries past a table's end may be missing or be the null page."""

    def table(self, sequence: str, group: int) -> Sequence[int]:
        """Pages of a sequence in one group, by page number."""

    def low(self, sequence: str, group: int) -> int:
        """The first position of a sequence that may be read in one group."""


class TableWriter(Protocol):
    """Block tables that a plan's changes are applied to."""

    def drop(self, sequence: str) -> None:
        """Forget the tables of a sequence, if there are any."""

    def assign(self, change: PageAssignment) -> None:
        """Change one table, which may be a new sequence's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVPlan:
    step: int
    assignments: tuple[PageAssignment, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    forgotten: tuple[str, ...] = ()
    """Sequences that have ended."""

    def apply_to(self, tables: TableWriter) -> None:
        """Bring block tables up to date. Ids may be used again, so tables are dropped before any are assigned."""
        for sequence in self.forgotten:
            tables.drop(sequence)
        for change in self.assignments:
            tables.assign(change)


class BlockTableLists:
    """Block tables as plain lists of page ids, for runners without tensors."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._tables: dict[str, list[list[int]]] = {}
        self._lows: dict[str, list[int]] = {}

    def drop(self, sequence: str) -> None:
        self._tables.pop(sequence, None)
        self._lows.pop(sequence, None)

    def assign(self, change: PageAssignment) -> None:
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
