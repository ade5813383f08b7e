"""What drafting for a request can be expected to bring, under each policy that might be chosen for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PRICES = (0.03, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8)
"""Least joint probabilities, from which the choice picks one.

A block's drafts are verified if they are at least as likely. A chain makes another pass if its drafts so far are at
least as likely, and its drafts are verified from a fraction of that on."""
CHAIN_VERIFIES_FROM = 0.35
"""Part of the price from which a chain's drafts are verified: going on costs a pass as well as a row."""


class Policy(NamedTuple):
    """How a request is drafted for."""

    size: int
    """Index of the number of drafts asked for."""
    price: int
    """Index in PRICES."""


class Outlook:
    """Moving averages over proposals, by policy: (drafts verified, drafts accepted, passes of a chain).

    For a chain there follows, by price, how often it makes each pass. A pass is run if any request makes it, so that
    the passes of a step are not known from the mean of each request's passes.
    """

    __slots__ = ("chain", "sizes", "values")

    def __init__(self, sizes: Sequence[int], *, chain: bool) -> None:
        """`sizes`: the numbers of drafts that may be asked for, ascending."""
        self.sizes = tuple(sizes)
        self.chain = chain
        # Good enough to be tried.
        self.values = self.of(tuple(0.75 ** (place + 1) for place in range(self.sizes[-1])))

    def copy(self) -> Outlook:
        other = Outlook.__new__(Outlook)
        other.sizes, other.chain, other.values = self.sizes, self.chain, self.values
        return other

    def at(self, policy: Policy) -> int:
        """Returns the index in `values` of the first of this policy's averages."""
        return 3 * (policy.size * len(PRICES) + policy.price)

    def passes_at(self, policy: Policy) -> int:
        """Returns the index in `values` from which on they say how often a chain makes each pass."""
        return (3 * len(self.sizes) * len(PRICES)) + policy.price * self.sizes[-1]

    def learn(self, proposal: Sequence[float], rate: float) -> None:
        """Moves the averages towards one proposal's values, see `of`."""
        self.values = [kept + rate * (new - kept) for kept, new in zip(self.values, proposal, strict=True)]

    def of(self, joint: Sequence[float]) -> list[float]:
        """Returns the values of one proposal, given the joint probabilities of the most drafts that may be asked for.
        They never rise."""
        sums = [0.0]
        for probability in joint:
            sums.append(sums[-1] + probability)
        most = len(joint)
        reached = most
        by_price: list[tuple[int, int]] = []
        for price in PRICES:
            while reached and joint[reached - 1] < price:
                reached -= 1
            by_price.append((reached, self._verified(joint, reached, price) if self.chain else reached))
        values: list[float] = []
        for size in self.sizes:
            for reached, verified in by_price:
                # One pass more than drafts that are likely enough to go on.
                passes = min(size, reached + 1)
                count = min(passes, verified) if self.chain else min(size, verified)
                values += (count, sums[count], passes)
        if self.chain:
            for reached, _verified in by_price:
                made = min(most, reached + 1)
                values += [1.0] * made
                values += [0.0] * (most - made)
        return values

    @staticmethod
    def _verified(joint: Sequence[float], reached: int, price: float) -> int:
        if reached < len(joint) and joint[reached] >= CHAIN_VERIFIES_FROM * price:
            return reached + 1
        return reached


def extended(joint: Sequence[float], count: int, continuation: float) -> tuple[float, ...]:
    """Returns joint probabilities of `count` drafts; those that were not proposed fall by the factor `continuation`."""
    found = list(joint[:count])
    last = found[-1] if found else 1.0
    while len(found) < count:
        last *= continuation
        found.append(last)
    return tuple(found)
