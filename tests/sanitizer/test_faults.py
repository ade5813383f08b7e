"""Every checker has its fault: each mutation is caught by the invariant it breaks, and only while it is applied."""

from __future__ import annotations

import importlib

import pytest

from outrider.tools.sim.mutation_table import MUTATIONS, Mutation, mutation_named
from outrider.tools.sim.mutations import try_mutation

SEED = 5


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught_by_the_invariant_it_breaks(mutation: Mutation) -> None:
    result = try_mutation(mutation, SEED)
    assert result.caught, (
        f"{result.mutation.name}: {result.invariant} instead of {mutation.invariant}: {result.message}"
    )


def test_every_invariant_has_a_fault() -> None:
    assert {mutation.invariant for mutation in MUTATIONS} == {f"I{number}" for number in range(1, 14)}


def test_the_first_four_reports_are_all_re_enacted() -> None:
    assert {"L1", "L2", "L3", "L4"} <= {mutation.lineage for mutation in MUTATIONS}
    assert sum(mutation.lineage == "L1" for mutation in MUTATIONS) >= 2


def test_mutations_have_names_of_their_own() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 15
    assert mutation_named(names[0]) is MUTATIONS[0]
    assert mutation_named("no such bug") is None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_leaves_nothing_behind(mutation: Mutation) -> None:
    module_name, path = mutation.where.split(":")
    owner = importlib.import_module(module_name)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    before = owner.__dict__[attribute]
    with mutation.applied():
        assert owner.__dict__[attribute] is not before
    assert owner.__dict__[attribute] is before
