"""A pacer keeps up with the fixed number of drafts that is best on each machine, which nobody knows beforehand.

Times are synthetic and seeded, so every run is the same.
"""

from __future__ import annotations

import pytest
from tests.scheduler.pacing.machines import Load, Machine, run_fixed, run_oracle, run_paced

STEPS = 400
ROWS_COST = Machine(
    fixed_s=20e-3,
    row_s=4e-3,
    hidden_rows=1,
    draft_fixed_s=3e-3,
    draft_row_s=5e-4,
    feed_row_s=3e-4,
    host_s=5e-4,
    host_request_s=1e-4,
)
"""Each row costs a fifth of a step, as on a processor."""
ROWS_ARE_FREE = Machine(
    fixed_s=8e-3,
    row_s=2e-5,
    hidden_rows=64,
    draft_fixed_s=1e-3,
    draft_row_s=5e-6,
    feed_row_s=5e-6,
    host_s=5e-4,
    host_request_s=2e-5,
)
"""Rows cost nothing before there are many, as on a GPU."""
MACHINES = {"rows cost": ROWS_COST, "rows are free": ROWS_ARE_FREE}


def load_of(machine: str, batch: int, skill: float, *, chain: bool) -> Load:
    k = 5 if chain else 7
    return Load(machine=MACHINES[machine], batch=batch, k=k, skill=skill, spread=0.7, overconfidence=0.5, chain=chain)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("chain", [False, True], ids=["block", "chain"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("skill", [0.3, 0.6, 0.85])
def test_it_keeps_up_with_the_best_fixed_number(machine: str, chain: bool, batch: int, skill: float) -> None:
    load = load_of(machine, batch, skill, chain=chain)
    rates = [run_fixed(load, 1, STEPS, k) for k in range(load.k + 1)]
    assert run_paced(load, 1, STEPS) > 0.85 * max(rates)
    # Having the choice costs next to nothing where drafting does not pay.
    assert run_paced(load, 1, STEPS) > 0.97 * rates[0]


@pytest.mark.parametrize("chain", [False, True], ids=["block", "chain"])
def test_no_choice_is_better_than_knowing_what_will_be_accepted(chain: bool) -> None:
    load = load_of("rows cost", 4, 0.7, chain=chain)
    assert run_paced(load, 1, STEPS) < run_oracle(load, 1, STEPS)


@pytest.mark.parametrize("chain", [False, True], ids=["block", "chain"])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_it_follows_a_drafter_that_becomes_worse_or_better(chain: bool, before: float, after: float) -> None:
    load = Load(
        machine=ROWS_COST, batch=2, k=5, skill=before, spread=0.5, chain=chain, later=ROWS_COST, later_skill=after
    )
    rates = [run_fixed(load, 1, 2 * STEPS, k) for k in range(load.k + 1)]
    # No number is right for both halves.
    assert run_paced(load, 1, 2 * STEPS) > 1.0 * max(rates)


@pytest.mark.parametrize("chain", [False, True], ids=["block", "chain"])
@pytest.mark.parametrize(("first", "later"), [(ROWS_COST, ROWS_ARE_FREE), (ROWS_ARE_FREE, ROWS_COST)])
def test_it_follows_a_machine_that_changes(chain: bool, first: Machine, later: Machine) -> None:
    load = Load(machine=first, batch=8, k=5, skill=0.7, spread=0.5, chain=chain, later=later)
    rates = [run_fixed(load, 1, 2 * STEPS, k) for k in range(load.k + 1)]
    assert run_paced(load, 1, 2 * STEPS) > 0.9 * max(rates)


def test_what_was_not_measured_is_learnt_from_steps() -> None:
    for chain in (False, True):
        load = load_of("rows cost", 8, 0.6, chain=chain)
        assert run_paced(load, 1, STEPS, warm=False) > 0.9 * run_paced(load, 1, STEPS)
