"""What a kind of KV group must answer: which positions a reader needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from outrider.kv.intervals import Interval


class HeldPages(Protocol):
    """What the cache holds of one sequence in one group."""

    page_tokens: int

    def leading_slots(self, page: int) -> int:
        """Returns the number of slots at the front of that page that are available."""

    def whole_prefix(self, max_pages: int) -> int:
        """Returns how many of the first `max_pages` pages are available whole, without a gap."""

    def last_found(self, page: int) -> int:
        """Returns the last page, at or before this one, of which any slot is available; -1 if there is none."""


class GroupKind(ABC):
    """A rule for which earlier positions a query still reads."""

    @abstractmethod
    def needed(self, end: int, margin: int = 0) -> Interval:
        """Returns the positions that must be held so that work may go on at `end`: an interval that stops there.
        A later end never needs an earlier position.

        The hit search (margin 0) and the retention mask both ask only this, so that they cannot disagree about
        what a hit needs.
        """

    @abstractmethod
    def longest(self, limit: int, held: HeldPages) -> int:
        """Returns the largest end <= limit at which everything `needed` is held."""

    @abstractmethod
    def freed_at(self, end: int) -> int | None:
        """Returns the first committed end at which nothing below position `end` is needed; None if there is none."""

    @abstractmethod
    def resident_tokens(self, length: int, step_tokens: int, margin: int) -> int:
        """Returns the most positions that a sequence of this length, advancing step_tokens at a time, holds at once."""

    @property
    @abstractmethod
    def slides(self) -> bool:
        """Whether earlier positions stop being needed as a sequence grows."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Short text for messages and fingerprints."""

    def first_key(self, position: int) -> int:
        """Returns the first position that a query at `position` reads."""
        return self.needed(position).start if position else 0
