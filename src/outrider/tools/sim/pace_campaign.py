"""The pacing campaign: on each synthetic machine, what the pacer reaches next to fixed numbers of drafts and an oracle.

I12: after it has learnt, the pacer reaches at least SLACK of the best fixed number of drafts, none included, on every
load, and MEAN_SLACK on average, where more than all of it counts as all. Where drafting gains as little as a few
hundredths, chance alone decides in a single run whether it is found out. It never reaches more than the oracle, or the
campaign itself is wrong: both meet the same drafts and the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from statistics import mean
from typing import Any

from outrider.tools.sim.pace_load import Load, Machine, Tape
from outrider.tools.sim.pace_run import FixedRun, Oracle, PacedRun, rate

SLACK, MEAN_SLACK = 0.965, 0.98
STEPS = 2000
LEARNING_STEPS = 200
"""Number of steps that do not count, at the beginning and after a change in the middle."""

# Every row costs time, as on a few cores.
CPU = Machine(
    fixed_s=0.02,
    row_s=0.004,
    draft_fixed_s=0.002,
    draft_row_s=0.0004,
    feed_row_s=0.0002,
    host_s=0.001,
    host_request_s=0.0001,
)
# Rows are free until arithmetic takes longer than reading the weights.
GPU = Machine(
    fixed_s=0.01,
    row_s=0.00005,
    hidden_rows=48,
    draft_fixed_s=0.0012,
    draft_row_s=0.000005,
    feed_row_s=0.000002,
    host_s=0.0008,
    host_request_s=0.00005,
)
# Rows cost time in tiles of eight.
TILED = replace(CPU, row_s=0.0015, rows_per_tile=8, hidden_rows=8)
BUSY = replace(GPU, row_s=0.002, hidden_rows=1, draft_fixed_s=0.004)
"""Another process takes the arithmetic: rows and passes cost more."""


def _steady_loads() -> tuple[Load, ...]:
    found = []
    for name, machine in (("cpu", CPU), ("gpu", GPU), ("tiles", TILED)):
        for kind, chain in (("chain", True), ("block", False)):
            for batch in (1, 4, 8, 32):
                for skill in (0.4, 0.75) if batch < 32 else (0.6,):
                    label = f"{name}, {kind}, batch {batch}, skill {skill}"
                    found.append(Load(name=label, machine=machine, batch=batch, skill=skill, chain=chain))
    return tuple(found)


def _hard_loads(kind: str, chain: bool) -> tuple[Load, ...]:
    def load(name: str, machine: Machine, batch: int, skill: float, **others: Any) -> Load:
        return Load(name=f"{kind}, {name}", machine=machine, batch=batch, skill=skill, chain=chain, **others)

    return (
        load("worthless and over-confident", CPU, 4, 0.04, overconfidence=4.0),
        load("over-confident", CPU, 4, 0.4, overconfidence=2.0),
        load("becomes good", CPU, 2, 0.05, later_skill=0.85),
        load("becomes bad", GPU, 4, 0.85, later_skill=0.1),
        load("machine gets busy", GPU, 6, 0.7, later=BUSY),
        load("machine gets free", BUSY, 6, 0.7, later=GPU),
        load("fades from draft to draft", CPU, 1, 0.99, fading=6.0),
        load("look-up beside it", CPU, 4, 0.5, copied=0.3),
    )


CHANGING_LOADS = (*_hard_loads("chain", True), *_hard_loads("block", False))
"""Loads on which a pacer must find out that something is not as it seemed."""
LOADS = (*_steady_loads(), *CHANGING_LOADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceResult:
    """Rates in tokens per second."""

    load: str
    seed: int
    paced: float
    plain: float
    best_fixed: float
    best_k: int
    oracle: float

    @property
    def ratio(self) -> float:
        """What the pacer reaches of the best that needs no pacer."""
        return self.paced / max(self.plain, self.best_fixed)

    @property
    def problem(self) -> str | None:
        """Returns what is wrong, if anything is."""
        if self.ratio < SLACK:
            return (
                f"the pacer reaches {self.ratio:.3f} of what {self.best_k if self.best_fixed > self.plain else 'no'} "
                f"drafts reach on {self.load!r}, and must reach {SLACK}"
            )
        if self.paced > self.oracle * (1.0 + 1e-6):
            return f"the pacer is {self.paced / self.oracle:.3f} times as fast as the oracle on {self.load!r}"
        return None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "problem": self.problem}


def mean_ratio(results: Sequence[PaceResult]) -> float:
    """Returns what the pacer reaches on average of the best that needs no pacer, all of it at most."""
    return mean(min(1.0, result.ratio) for result in results)


def run_load(load: Load, seed: int, steps: int = STEPS) -> PaceResult:
    tape = Tape(load, seed, steps)
    changes = load.later is not None or load.later_skill is not None
    half = steps // 2
    measured = [step for step in range(LEARNING_STEPS, steps) if not (changes and half <= step < half + LEARNING_STEPS)]
    fixed = {k: rate(FixedRun(tape, k).steps(), measured) for k in (0, *load.sizes)}
    best_k = max(load.sizes, key=fixed.__getitem__)
    return PaceResult(
        load=load.name,
        seed=seed,
        paced=rate(PacedRun(tape).steps(), measured),
        plain=fixed[0],
        best_fixed=fixed[best_k],
        best_k=best_k,
        oracle=Oracle(tape, measured).rate(),
    )


def _run_job(job: tuple[Load, int]) -> PaceResult:
    return run_load(*job)


def run_pace_campaign(
    seeds: Sequence[int],
    loads: Sequence[Load] = LOADS,
    *,
    processes: int = 1,
    progress: Callable[[], None] | None = None,
) -> list[PaceResult]:
    """Runs every load with every seed."""
    jobs = [(load, seed) for load in loads for seed in seeds]
    results = []
    with Pool(processes) as pool:
        for result in pool.imap(_run_job, jobs):
            results.append(result)
            if progress is not None:
                progress()
    return results
