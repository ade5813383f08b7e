"""The choice: the best that its own costs allow, from its arguments alone."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.pacing import choice
from outrider.scheduler.pacing.choice import (
    MARGIN,
    NEGLIGIBLE,
    ChainPasses,
    StepSeconds,
    chain_passes,
    choose_drafting,
    choose_verified,
    numbers_to_try,
)
from outrider.scheduler.pacing.outlook import PRICES, Outlook, Policy

falling = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda each: list(accumulate(each, mul)))
ANY = Policy(0, 0)


def rising(prices: list[float]) -> Callable[[int], float]:
    """Seconds as a function of rows, with a price for each further row."""
    sums = list(accumulate(prices, initial=0.0))
    return lambda rows: sums[rows]


def net_of(
    joint: list[list[float]], counts: list[int], base: int, rows_s: Callable[[int], float], rate: float
) -> float:
    gain = sum(sum(each[:count]) for each, count in zip(joint, counts, strict=True))
    return gain - MARGIN * rate * (rows_s(base + sum(counts)) - rows_s(base))


@settings(max_examples=200, deadline=None)
@given(
    joint=st.lists(falling, min_size=1, max_size=3),
    prices=st.lists(st.sampled_from((0.0, 0.02, 0.3, 2.0)), min_size=20, max_size=20),
    rate=st.floats(0.1, 5.0),
)
def test_what_is_verified_is_the_best_of_all_that_could_be(
    joint: list[list[float]], prices: list[float], rate: float
) -> None:
    """Any prices: rows that come in steps too. A draft can be verified only after those before it."""
    base, rows_s = len(joint), rising(prices)
    counts, least = choose_verified(joint, base_rows=base, rows_s=rows_s, rate=rate)
    every = [list(each) for each in product(*(range(len(one) + 1) for one in joint))]
    likely = [
        [min(count, sum(p > NEGLIGIBLE for p in one)) for count, one in zip(each, joint, strict=True)] for each in every
    ]
    best = max(net_of(joint, each, base, rows_s, rate) for each in likely)
    assert net_of(joint, counts, base, rows_s, rate) == pytest.approx(best, abs=1e-9)
    verified = [p for one, count in zip(joint, counts, strict=True) for p in one[:count]]
    assert least == (min(verified) if verified else 1.0)


def test_free_rows_verify_all_that_is_not_negligible() -> None:
    counts, _least = choose_verified([[0.9, 0.1, NEGLIGIBLE / 2], []], base_rows=2, rows_s=lambda rows: 1.0, rate=9.0)
    assert counts == [2, 0]


def machine(pass_s: float, row_s: float, chain: bool) -> StepSeconds:
    def step_s(many: int, drafts: float, gained: float, made: ChainPasses, policy: Policy) -> float:
        passes = sum(any_does for _mean, any_does in made) if chain else min(many, 1)
        return 1.0 + row_s * drafts + pass_s * passes

    return step_s


def outlooks(seed: int, count: int, chain: bool) -> list[Outlook]:
    random, found = Random(seed), []
    for _ in range(count):
        outlook = Outlook((1, 2, 4), chain=chain)
        for _ in range(40):
            each = random.random()
            outlook.learn(outlook.of(tuple(each ** (place + 1) for place in range(4))), 0.2)
        found.append(outlook)
    return found


@settings(deadline=None)
@given(
    seed=st.integers(0, 50),
    count=st.integers(0, 9),
    chain=st.booleans(),
    pass_s=st.sampled_from((0.0, 0.1, 1.0)),
    row_s=st.sampled_from((0.0, 0.1, 1.0)),
)
def test_drafting_is_never_expected_to_be_slower_than_plain_decoding(
    seed: int, count: int, chain: bool, pass_s: float, row_s: float
) -> None:
    committed, step_s = max(1, count), machine(pass_s, row_s, chain)
    rate, last = float(committed), Policy(0, 3)
    for _ in range(3):
        found = choose_drafting(outlooks(seed, count, chain), committed=committed, step_s=step_s, rate=rate, last=last)
        assert found.plain_rate == pytest.approx(committed)
        assert found.rate >= found.plain_rate - 1e-9
        assert len(set(found.requests)) == len(found.requests) <= count
        rate, last = found.rate, found.policy


def test_free_drafting_is_done_for_all_and_hopeless_drafting_for_none() -> None:
    given_ = outlooks(3, 5, chain=False)
    free = choose_drafting(given_, committed=5, step_s=machine(0.0, 0.0, False), rate=5.0, last=ANY)
    assert sorted(free.requests) == [0, 1, 2, 3, 4]
    dear = choose_drafting(given_, committed=5, step_s=machine(50.0, 1.0, False), rate=5.0, last=ANY)
    assert dear.requests == ()


def test_where_drafting_costs_by_request_only_those_that_are_worth_it_get_drafts() -> None:
    good, bad = (Outlook((2,), chain=False) for _ in range(2))
    for outlook, joint in ((good, (0.95, 0.9)), (bad, (0.01, 0.0))):
        for _ in range(60):
            outlook.learn(outlook.of(joint), 0.2)

    def step_s(many: int, drafts: float, gained: float, made: ChainPasses, policy: Policy) -> float:
        return 1.0 + 0.2 * many

    found = choose_drafting([bad, good, bad, good], committed=4, step_s=step_s, rate=4.0, last=ANY)
    assert sorted(found.requests) == [1, 3]


@settings(deadline=None)
@given(chances=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_a_pass_of_a_batch_is_run_if_any_request_makes_it(chances: list[float]) -> None:
    """One request in ten goes on: among many, nearly always one does."""
    outlook = Outlook((2,), chain=True)
    values = []
    for chance in chances:
        own = outlook.copy()
        first = own.passes_at(ANY)
        own.values = [*own.values[:first], 1.0, chance, *own.values[first + 2 :]]
        values.append(own.values)
    none = 1.0
    for chance in chances:
        none *= 1.0 - chance
    assert chain_passes(values, outlook, ANY) == [
        (pytest.approx(len(chances)), pytest.approx(1.0)),
        (pytest.approx(sum(chances)), pytest.approx(1.0 - none)),
    ]


def test_numbers_of_requests_to_try_end_with_all_of_them() -> None:
    assert numbers_to_try(0) == []
    assert numbers_to_try(1) == [1]
    assert numbers_to_try(10) == [1, 2, 3, 4, 6, 8, 10]


def test_the_choice_has_no_state_and_needs_no_tensors() -> None:
    tree = ast.parse(Path(choice.__file__).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert not any(str(name).split(".")[0] in ("torch", "numpy", "random", "time") for name in imported)
    assert not any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(tree))
    given_ = outlooks(5, 6, chain=True)
    before = [outlook.values.copy() for outlook in given_]
    arguments = {"committed": 6, "step_s": machine(0.05, 0.05, True), "rate": 6.0, "last": Policy(0, 0)}
    assert choose_drafting(given_, **arguments) == choose_drafting(given_, **arguments)
    assert [outlook.values for outlook in given_] == before
    assert len(PRICES) == len(set(PRICES))
