"""Pages that were given up while KV was on its way into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.scheduler.roster import QuarantinedPages


@dataclass(slots=True, eq=False)
class Aside:
    """Pages in quarantine until the reads that may write to them have ended."""

    pages: list[tuple[int, list[int]]]
    peer_reads: set[int]
    tier_loads: set[int]


class Quarantine:
    """Keeps pages until the last read or load that may write to them has ended, and gives them back then."""

    def __init__(self, restore: Callable[[QuarantinedPages], None]) -> None:
        self._restore = restore
        self._aside: list[Aside] = []

    def add(self, pages: QuarantinedPages, *, peer_reads: set[int], tier_loads: set[int]) -> None:
        if pages:
            self._aside.append(Aside(pages, peer_reads, tier_loads))

    def read_ended(self, number: int) -> None:
        for aside in self._aside:
            aside.peer_reads.discard(number)

    def load_ended(self, number: int) -> None:
        for aside in self._aside:
            aside.tier_loads.discard(number)

    def give_back(self) -> None:
        """Give back pages that nothing can write to any more."""
        for aside in [aside for aside in self._aside if not aside.peer_reads and not aside.tier_loads]:
            self._aside.remove(aside)
            self._restore(aside.pages)

    def __len__(self) -> int:
        return len(self._aside)
