"""The pacing campaign: the pacer is as good as the best fixed number of drafts, and the oracle bounds everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from outrider.tools.sim.pace_campaign import (
    CHANGING_LOADS,
    CPU,
    LEARNING_STEPS,
    LOADS,
    MEAN_SLACK,
    SLACK,
    PaceResult,
    mean_ratio,
    run_load,
    run_pace_campaign,
)
from outrider.tools.sim.pace_load import Load, Tape
from outrider.tools.sim.pace_run import FixedRun, Oracle, PacedRun, Run, rate

# What takes long to simulate is left to `outrider sim --pacing`.
QUICK_LOADS = [load for load in LOADS if load.batch <= 8]


@pytest.fixture(scope="module")
def quick_results() -> list[PaceResult]:
    return run_pace_campaign((1,), QUICK_LOADS, processes=2)


def test_the_pacer_reaches_the_best_fixed_number_of_drafts_and_never_the_oracle(
    quick_results: list[PaceResult],
) -> None:
    assert [result.problem for result in quick_results if result.problem is not None] == []
    assert mean_ratio(quick_results) >= MEAN_SLACK


def test_where_requests_differ_the_pacer_is_better_than_any_fixed_number() -> None:
    assert max(run_load(load, seed=1).ratio for load in CHANGING_LOADS) > 1.1


def test_a_run_is_the_same_every_time() -> None:
    load = CHANGING_LOADS[0]
    steps = 2 * LEARNING_STEPS + 100
    assert run_load(load, seed=3, steps=steps) == run_load(load, seed=3, steps=steps)
    assert run_load(load, seed=3, steps=steps) != run_load(load, seed=4, steps=steps)


def test_all_policies_meet_the_same_drafts_and_the_same_noise() -> None:
    tape = Tape(CHANGING_LOADS[1], 5, 50)
    plain = FixedRun(tape, 0).steps()
    assert plain == FixedRun(tape, 0).steps()
    paced = PacedRun(tape)
    paced.pacer.forced = (0, 0)
    assert paced.steps() == plain


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("copied", [0.0, 0.5])
def test_the_oracle_bounds_every_way_of_drafting(chain: bool, copied: float) -> None:
    """All combinations of numbers of drafts over a few steps of two requests, with every draft that is accepted."""
    load = Load(name="small", machine=replace(CPU, noise=0.3), batch=2, k=2, skill=0.7, chain=chain, copied=copied)
    for seed in range(4):
        tape = Tape(load, seed, 3)
        measured = range(3)
        best = 0.0
        for wanted in product(range(load.k + 1), repeat=4):
            best = max(best, rate(ScriptedRun(tape, wanted).steps(), measured))
        bound = Oracle(tape, measured).rate()
        assert best <= bound * (1 + 1e-9)
        assert bound >= rate(FixedRun(tape, 0).steps(), measured)


class ScriptedRun(Run):
    """Asks for given numbers of drafts, of each request at each step, and for none at the end."""

    def __init__(self, tape: Tape, wanted: tuple[int, ...]) -> None:
        super().__init__(tape)
        self._wanted = iter((*wanted, 0, 0))

    def begin(self) -> None:
        for request in self.requests:
            request.wanted = next(self._wanted)


def test_an_oracle_that_may_not_draft_decodes_plainly() -> None:
    tape = Tape(Load(name="hopeless", machine=CPU, batch=3, skill=1e-9, spread=0.0), 1, 40)
    measured = range(40)
    assert Oracle(tape, measured).rate() == pytest.approx(rate(FixedRun(tape, 0).steps(), measured))


def test_a_pacer_that_is_too_slow_is_a_problem_and_so_is_one_that_beats_the_oracle() -> None:
    result = PaceResult(load="x", seed=1, paced=94.0, plain=100.0, best_fixed=90.0, best_k=2, oracle=150.0)
    assert result.ratio == pytest.approx(0.94)
    assert result.ratio < SLACK
    assert result.problem is not None
    assert "no drafts" in result.problem
    assert replace(result, paced=98.0).problem is None
    assert "oracle" in str(replace(result, paced=151.0).problem)
    assert mean_ratio([result, replace(result, paced=120.0)]) == pytest.approx(0.97)


def test_a_campaign_runs_every_load_with_every_seed() -> None:
    loads = [replace(load, name=f"{load.name} again") for load in LOADS[:2]]
    results = run_pace_campaign((1, 2), loads, processes=2)
    assert [(result.load, result.seed) for result in results] == [
        (load.name, seed) for load in loads for seed in (1, 2)
    ]
