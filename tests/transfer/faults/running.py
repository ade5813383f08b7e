"""Runs cases of the failure table, and counts them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.transfer.faults.rows import ROWS, Row
from tests.transfer.faults.world import SHAPES, Shape, Site, World, turned_clock

POLICIES = ("recompute", "fail")


class Case(NamedTuple):
    row: Row
    phase: str
    policy: str
    shape: Shape
    seed: int

    def __str__(self) -> str:
        return f"{self.row.name} ({self.phase}), {self.policy}, {', '.join(map(str, self.shape))}, seed {self.seed}"


def cases(per_phase: int) -> Iterator[Case]:
    """Every row in every phase under both policies, on several shapes each."""
    shapes, seeds = itertools.cycle(SHAPES), itertools.count()
    for row in ROWS:
        for phase in row.phases:
            for policy in POLICIES:
                for _ in range(per_phase):
                    yield Case(row, phase, policy, next(shapes), next(seeds))
        # So that a row does not meet the same shapes in the same phases for each policy.
        next(shapes)


class Sites:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sites: dict[Shape, Site] = {}

    def of(self, shape: Shape) -> Site:
        if shape not in self._sites:
            directory = self._directory / str(len(self._sites))
            directory.mkdir()
            self._sites[shape] = Site(shape, directory)
        return self._sites[shape]


def run_case(case: Case, sites: Sites) -> None:
    """Raises AssertionError with what is wrong."""
    with turned_clock() as clock:
        world = World(sites.of(case.shape), case.policy, case.seed, clock)
        try:
            expects = case.row.run(world, case.phase)
            world.check(expects)
            world.check_pages()
        finally:
            world.close()


class Totals:
    """Counts of cases by row and phase, and of what went wrong."""

    def __init__(self) -> None:
        self.passed: Counter[tuple[str, str]] = Counter()
        self.failed: list[tuple[Case, BaseException]] = []

    def run(self, case: Case, sites: Sites) -> None:
        try:
            run_case(case, sites)
            self.passed[case.row.name, case.phase] += 1
        except Exception as error:
            self.failed.append((case, error))


if __name__ == "__main__":
    import sys, tempfile, torch, traceback
    torch.set_num_threads(1)
    sites = Sites(Path(tempfile.mkdtemp()))
    totals = Totals()
    n = int(sys.argv[1])
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    began = time.monotonic()
    count = 0
    for case in cases(n):
        if only not in str(case): continue
        t = time.monotonic()
        before = len(totals.failed)
        totals.run(case, sites)
        count += 1
        if len(totals.failed) > before:
            print("FAIL", case, round(time.monotonic() - t, 2))
            traceback.print_exception(totals.failed[-1][1], limit=-4 if len(sys.argv) <= 3 else None)
    print(count, "cases", len(totals.failed), "failed", time.monotonic() - began)
