"""Loads from the tiers behind the device: which are on their way, for which sequence, and for how long."""

from __future__ import annotations

from collections.abc import Callable

from outrider.kv.ledger import Load
from outrider.scheduler import Scheduler
from outrider.transfer.link import Landed
from outrider.transfer.records import Tiers


class TierLoads:
    def __init__(
        self, tiers: Tiers | None, scheduler: Scheduler, *, limit_s: float, clock: Callable[[], float]
    ) -> None:
        """`limit_s`: how long the loads of one sequence may take."""
        self._tiers = tiers
        self._scheduler = scheduler
        self._limit_s = limit_s
        self._clock = clock
        self._loads: dict[int, tuple[str, Load] | None] = {}
        """Loads that have not ended, by number, with their sequences; None for a load that was given up."""
        self._ends_s: dict[str, float] = {}
        """When the loads of a sequence are given up."""

    def start(self, sequence: str, load: Load) -> None:
        assert self._tiers is not None, "a load from a tier that this worker does not have"
        size = self._scheduler.kv.layout.groups[load.group].page_tokens
        page = self._scheduler.requests[sequence].kv.groups[load.group].pages[load.interval.start // size]
        number = self._tiers.load(load, page, sequence)
        self._loads[number] = (sequence, load)
        self._ends_s[sequence] = self._clock() + self._limit_s

    def give_up(self, sequence: str) -> set[int]:
        """Forget whose the loads of a sequence are; returns their numbers. They may still write to its pages, and must
        not be taken for loads of the same KV that the sequence begins later."""
        numbers = self._numbers_of(sequence)
        self._loads.update(dict.fromkeys(numbers))
        self._ends_s.pop(sequence, None)
        return numbers

    def _numbers_of(self, sequence: str) -> set[int]:
        return {number for number, load in self._loads.items() if load is not None and load[0] == sequence}

    def poll(self) -> list[int]:
        """Tell the scheduler about loads that have ended; returns their numbers."""
        ended = []
        for event in self._tiers.poll() if self._tiers is not None else ():
            ended.append(event.transfer)
            found = self._loads.pop(event.transfer, None)
            if found is None:
                continue
            sequence, load = found
            if not self._numbers_of(sequence):
                self._ends_s.pop(sequence, None)
            if isinstance(event, Landed):
                self._scheduler.load_arrived(sequence, load)
            else:
                self._scheduler.load_failed(sequence, load)
        return ended

    def give_up_overdue(self, now_s: float) -> None:
        for sequence in [name for name, end_s in self._ends_s.items() if end_s <= now_s]:
            del self._ends_s[sequence]
            self._scheduler.load_lost(sequence)

    @property
    def deadlines_s(self) -> list[float]:
        return list(self._ends_s.values())

    def __len__(self) -> int:
        return len(self._loads)
