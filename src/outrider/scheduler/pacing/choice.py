"""The choice: how many drafts a step verifies, and for which requests the drafter proposes the next ones.

Both maximise the tokens that are committed per second. With `rate`, the rate that can be kept up, a second is worth
`rate` tokens, so that whatever gains more tokens than the time it takes is worth is worth doing:

    verify      the likeliest drafts of the batch, as long as gain - rate * seconds rises
    draft       gain - rate * further seconds of a step that verifies what a step like it proposed, over all numbers
                of requests, numbers of drafts and least probabilities

The rate follows from the choice itself: that of the best step is the next step's `rate` (Dinkelbach's method), so both
settle within a few steps. Everything here is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from outrider.scheduler.pacing.outlook import PRICES, Outlook, Policy

MARGIN = 1.02
"""What a gain must be of its cost at least: the largest of many estimates is usually too large, and what drafting takes
beyond the costs that are told apart (memory that leaves the caches) is not known."""
NEGLIGIBLE = 0.004
"""Drafts that are less likely are not worth a look."""

PROMISING = 2
"""Number of policies that are tried for some of the requests only."""

ChainPasses = Sequence[tuple[float, float]]
"""For each pass that a chain may make: (mean number of requests that make it, probability that any does)."""
StepSeconds = Callable[[int, float, float, ChainPasses, Policy], float]
"""(drafting requests; over all of them: drafts verified, drafts accepted, passes of a chain; policy) -> seconds of a
step of this batch."""
PLAINLY = Policy(0, 0)
"""Stands in the place of a policy where nothing is drafted."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """For which requests the drafter proposes, and on what terms."""

    requests: tuple[int, ...]
    """Numbers of the requests."""
    policy: Policy
    rate: float
    """Tokens per second that are expected."""
    plain_rate: float
    """Tokens per second that are expected without drafts."""


def choose_verified(
    joint: Sequence[Sequence[float]], *, base_rows: int, rows_s: Callable[[int], float], rate: float
) -> tuple[list[int], float]:
    """Returns how many of each request's drafts to verify, and the least joint probability among them.

    `joint` has falling probabilities for each request, `base_rows` is what the step runs anyway, and `rows_s` gives the
    seconds that so many rows take.
    """
    counts = [0] * len(joint)
    ranked = sorted(
        (
            (probability, -number)
            for number, each in enumerate(joint)
            for probability in each
            if probability > NEGLIGIBLE
        ),
        reverse=True,
    )
    if not ranked:
        return counts, 1.0
    base_s, price = rows_s(base_rows), MARGIN * rate
    best, best_count, gained = 0.0, 0, 0.0
    for count, (probability, _number) in enumerate(ranked, start=1):
        gained += probability
        net = gained - price * (rows_s(base_rows + count) - base_s)
        if net > best:
            best, best_count = net, count
    for _probability, number in ranked[:best_count]:
        counts[-number] += 1
    return counts, ranked[best_count - 1][0] if best_count else 1.0


def numbers_to_try(most: int) -> list[int]:
    """Returns how many requests might be drafted for: all numbers up to four, then fewer and fewer, and all of them."""
    found = [number for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192) if number < most]
    return [*found, most] if most else []


def chain_passes(values: Sequence[Sequence[float]], outlook: Outlook, policy: Policy) -> ChainPasses:
    """Returns what passes a chain makes for requests with these values, up to the most drafts that may be asked for."""
    at, found = outlook.passes_at(policy), []
    for place in range(at, at + outlook.sizes[-1]):
        mean, none = 0.0, 1.0
        for each in values:
            makes = each[place]
            mean += makes
            none *= 1.0 - makes
        found.append((mean, 1.0 - none))
    return found


def choose_drafting(
    outlooks: Sequence[Outlook], *, committed: int, step_s: StepSeconds, rate: float, last: Policy
) -> Drafting:
    """Returns for which requests to propose. `committed` is the number of tokens that the step yields in any case, and
    `last` is the policy of the last choice, by which the requests are ranked."""
    plain_s = step_s(0, 0.0, 0.0, (), PLAINLY)
    plain_rate = committed / plain_s
    best_net, best_rate, best, price_s = 0.0, plain_rate, None, MARGIN * rate
    if outlooks:
        first = outlooks[0]
        near, price = first.at(last), PRICES[last.price]
        ranked = [(each.values[near + 1] - price * each.values[near], -number) for number, each in enumerate(outlooks)]
        ranked.sort(reverse=True)
        values = [outlooks[-number].values for _worth, number in ranked]
        policies = [Policy(size, price) for size in range(len(first.sizes)) for price in range(len(PRICES))]
        chain = first.chain
        by_price = [chain_passes(values, first, policy) if chain else () for policy in policies[: len(PRICES)]]
        found = []
        for policy in policies:
            at = first.at(policy)
            many = len(values)
            gain = sum(each[at + 1] for each in values)
            seconds = step_s(many, sum(each[at] for each in values), gain, by_price[policy.price], policy)
            found.append((gain - price_s * (seconds - plain_s), (committed + gain) / seconds, many, policy))
        found.sort(key=itemgetter(0), reverse=True)
        # What is best for all requests is nearly best for some of them.
        for policy in [policy for _net, _rate, _many, policy in found[:PROMISING]]:
            at = first.at(policy)
            drafts = list(accumulate(each[at] for each in values))
            gains = list(accumulate(each[at + 1] for each in values))
            for many in numbers_to_try(len(values))[:-1]:
                gain = gains[many - 1]
                passes = chain_passes(values[:many], first, policy) if chain else ()
                seconds = step_s(many, drafts[many - 1], gain, passes, policy)
                found.append((gain - price_s * (seconds - plain_s), (committed + gain) / seconds, many, policy))
        for net, rate_found, many, policy in found:
            if net > best_net:
                best_net, best_rate, best = net, rate_found, (many, policy)
        if best is not None:
            many, policy = best
            chosen = tuple(-number for _worth, number in ranked[:many])
            return Drafting(chosen, policy, rate=best_rate, plain_rate=plain_rate)
    return Drafting((), last, rate=best_rate, plain_rate=plain_rate)
