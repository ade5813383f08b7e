"""Runs cases of the failure table, and counts them."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tests.transfer.faults.process_rows import Crew, process_cases, run_process_case
from tests.transfer.faults.rows import ROWS, Row
from tests.transfer.faults.world import SHAPES, Shape, Site, World, turned_clock

POLICIES = ("recompute", "fail")
ALL_PHASES = "abcdefg"


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


def hangs(error: BaseException) -> bool:
    return "does not come to pass" in str(error) or "does not end" in str(error)


class Totals:
    """Counts of cases by row and phase, and of what went wrong."""

    def __init__(self) -> None:
        self.passed: Counter[tuple[str, str]] = Counter()
        self.failed: list[tuple[str, BaseException]] = []

    def run(self, row: str, phase: str, case: object, check: Callable[[], None]) -> None:
        try:
            check()
            self.passed[row, phase] += 1
        except Exception as error:
            self.failed.append((str(case), error))
            print(f"FAILED: {case}", file=sys.stderr)
            traceback.print_exception(error)

    def table(self) -> str:
        rows = dict.fromkeys(row for row, _phase in self.passed)
        width = max(map(len, rows), default=0)
        lines = [f"{'':{width}} {''.join(f'{phase:>5}' for phase in ALL_PHASES)}"]
        for row in rows:
            counts = [self.passed[row, phase] for phase in ALL_PHASES]
            lines.append(f"{row:{width}} " + "".join(f"{count if count else '':>5}" for count in counts))
        return "\n".join(lines)

    def summary(self) -> str:
        stuck = sum(hangs(error) for _case, error in self.failed)
        pages = sum("assert_nothing_left" in _names(error) for _case, error in self.failed)
        passed = sum(self.passed.values())
        return (
            f"{passed} cases passed, {len(self.failed)} failed: hangs {stuck}, pages lost {pages}, wrong texts and "
            f"other failures {len(self.failed) - stuck - pages}"
        )


def _names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the failure table of prefill/decode disaggregation.")
    parser.add_argument("--per-phase", type=int, default=3, help="cases of a row in a phase for each policy")
    parser.add_argument("--only", default="", help="run cases whose description contains this text")
    parser.add_argument("--link", choices=("local", "nixl", "both"), default="both")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("outrider.transfer").setLevel(logging.ERROR)
    ok = True
    with tempfile.TemporaryDirectory() as directory:
        if given.link != "nixl":
            ok &= run_local(Path(directory), given.per_phase, given.only)
        if given.link != "local":
            ok &= run_nixl(Path(directory), given.only)
    return 0 if ok else 1


def run_local(directory: Path, per_phase: int, only: str) -> bool:
    totals, sites = Totals(), Sites(directory)
    for case in cases(per_phase):
        if only in str(case):
            totals.run(case.row.name, case.phase, case, partial(run_case, case, sites))
    print(f"over the local link\n{totals.table()}\n{totals.summary()}")
    return not totals.failed


def run_nixl(directory: Path, only: str) -> bool:
    totals, crew = Totals(), Crew(directory)
    try:
        for case in process_cases():
            if only in str(case):
                row = f"{case.row}, {case.transport}"
                totals.run(row, case.phase, case, partial(run_process_case, case, crew))
    finally:
        crew.close()
    print(f"over nixl, between processes\n{totals.table()}\n{totals.summary()}")
    return not totals.failed


if __name__ == "__main__":
    sys.exit(main())
