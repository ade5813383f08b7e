"""What a kind of KV group must answer: which positions a reader needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from outrider.kv.intervals import Interval


class HeldPages(Protocol):
    """What the cache can serve of one sequence in one group."""

    page_tokens: int

    def leading_slots(self, page: int) -> int:
        """How many slots at the front of that page can be had."""

    def whole_prefix(self, max_pages: int) -> int:
        """How many of the first `max_pages` pages can be had whole, without a gap."""

    def last_found(self, page: int) -> int:
        """The last page, at or before this one, of which any slot can be had; -1 if there is none."""


class GroupKind(ABC):
    """A rule for which earlier positions a query still reads."""

    @abstractmethod
    def needed(self, end: int, margin: int = 0) -> Interval:
        """Positions that must be held so that work may go on at position `end`: an interval that stops there.
        A later end never needs an earlier position.

        The hit search (margin 0) and the retention mask both call this and nothing else, so that they
        cannot disagree about what a hit needs.
        """

    @abstractmethod
    def longest(self, limit: int, held: HeldPages) -> int:
        """The largest end <= limit at which everything `needed` is held."""

    @abstractmethod
    def freed_at(self, end: int) -> int | None:
        """The first committed end at which nothing below position `end` is needed; None if that never comes."""

    @abstractmethod
    def resident_tokens(self, length: int, step_tokens: int, margin: int) -> int:
        """Most positions held at once by a sequence of this length that advances step_tokens at a time."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Short text for messages and fingerprints."""

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` reads."""
        return self.needed(position).start if position else 0
