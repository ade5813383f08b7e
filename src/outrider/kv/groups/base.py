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

    def retains(self, page: Interval, *, alignment: int, margin: int) -> bool:
        """Is a full page worth keeping once its sequence has moved on?

        A hit ends at a multiple b of `alignment`, or up to `margin` positions before one. The nearest b
        past the page's start asks for the most of it, so it decides:

            page            [s ----- e)
            boundary                        b
            needed(b)             [--------)        kept, since needed(b).start < e
        """
        boundary = (page.start // alignment + 1) * alignment
        return self.needed(boundary, margin).start < page.end
