"""Outlooks: what each policy would have made of a proposal, counted as it would be run."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.pacing.outlook import CHAIN_VERIFIES_FROM, PRICES, Outlook, Policy, extended

SIZES = (1, 3, 6)
joints = st.lists(st.floats(0.0, 1.0), min_size=SIZES[-1], max_size=SIZES[-1]).map(
    lambda each: tuple(accumulate(each, mul))
)
policies = [Policy(size, price) for size in range(len(SIZES)) for price in range(len(PRICES))]


def block(joint: tuple[float, ...], size: int, price: float) -> tuple[float, float]:
    drafts = [probability for probability in joint[:size] if probability >= price]
    return len(drafts), sum(drafts)


def chain(joint: tuple[float, ...], size: int, price: float) -> tuple[float, float, float]:
    """Runs the chain pass by pass."""
    proposed: list[float] = []
    while len(proposed) < size:
        proposed.append(joint[len(proposed)])
        if proposed[-1] < price:
            break
    passes = len(proposed)
    if proposed[-1] < CHAIN_VERIFIES_FROM * price:
        proposed.pop()
    return len(proposed), sum(proposed), passes


@settings(deadline=None)
@given(joint=joints)
def test_a_block_is_verified_as_far_as_its_drafts_are_likely_enough(joint: tuple[float, ...]) -> None:
    outlook = Outlook(SIZES, chain=False)
    values = outlook.of(joint)
    for policy in policies:
        at = outlook.at(policy)
        assert values[at : at + 2] == pytest.approx(block(joint, SIZES[policy.size], PRICES[policy.price]))


@settings(deadline=None)
@given(joint=joints)
def test_a_chain_goes_on_as_long_as_its_drafts_are_likely_enough(joint: tuple[float, ...]) -> None:
    outlook = Outlook(SIZES, chain=True)
    values = outlook.of(joint)
    for policy in policies:
        at, size = outlook.at(policy), SIZES[policy.size]
        drafts, accepted, passes = chain(joint, size, PRICES[policy.price])
        assert values[at : at + 3] == pytest.approx((drafts, accepted, passes))
        first = outlook.passes_at(policy)
        # How often each pass is made does not depend on how many drafts are asked for.
        assert values[first : first + size] == [1.0] * passes + [0.0] * (size - passes)


def test_averages_follow_proposals() -> None:
    outlook = Outlook(SIZES, chain=True)
    proposal = outlook.of((0.0,) * SIZES[-1])
    for _ in range(200):
        outlook.learn(proposal, 0.1)
    assert outlook.values == pytest.approx(proposal, abs=1e-6)


def test_a_copy_learns_for_itself() -> None:
    outlook = Outlook(SIZES, chain=False)
    other = outlook.copy()
    other.learn(other.of((0.0,) * SIZES[-1]), 0.5)
    assert outlook.values == Outlook(SIZES, chain=False).values != other.values


def test_drafts_that_were_not_proposed_are_less_and_less_likely() -> None:
    assert extended((0.8, 0.4), 4, 0.5) == pytest.approx((0.8, 0.4, 0.2, 0.1))
    assert extended((), 2, 0.5) == pytest.approx((0.5, 0.25))
    assert extended((0.9, 0.8, 0.7), 2, 0.5) == (0.9, 0.8)
