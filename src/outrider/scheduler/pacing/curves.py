"""Seconds as a function of a count, learnt from single observations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp

KNOTS: tuple[int, ...] = (
    *range(1, 17),
    20,
    24,
    28,
    32,
    40,
    48,
    64,
    80,
    96,
    112,
    128,
    192,
    256,
    384,
    512,
    1024,
    2048,
    4096,
    8192,
)
"""Counts at which a curve has a value of its own; between two of them it is a straight line."""
LEAST_RATE = 0.02
"""Weight of an observation at a knot that has seen many: what is older than about fifty of them is forgotten."""
FORGOTTEN_AFTER = 150.0
"""Steps after which a knot's observations count for about a third: what was not observed for long is soon learnt
anew."""
REFILL_AFTER = 32
"""Number of observations after which knots without observations follow their neighbours again."""


def _place(count: int) -> tuple[int, float]:
    """Returns the knot at or below a count, and how far the count lies towards the next one, from 0 to 1."""
    low = min(bisect_right(KNOTS, count) - 1, len(KNOTS) - 2)
    return low, (count - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])


_PLACES = [(0, 0.0), *(_place(count) for count in range(1, 513))]


class Curve:
    """A piecewise linear function of a count, with one value per knot.

    A knot that was never observed takes its value from `shape`, scaled as its observed neighbours are; beyond the
    largest observed count, the curve goes on as it rose before.
    """

    __slots__ = ("_last", "_seen", "_shape", "_since_fill", "values")

    def __init__(self, shape: Sequence[float]) -> None:
        """`shape`: what the values are in proportion to each other until they are observed."""
        self.values = list(shape)
        self._shape = tuple(shape)
        self._seen = [0.0] * len(KNOTS)
        """Weight of the observations of each knot."""
        self._last = [0] * len(KNOTS)
        """The step of each knot's last observation."""
        self._since_fill = 0

    @property
    def observed(self) -> list[tuple[int, float]]:
        """The knots that were observed, with their values."""
        return [(knot, self.values[n]) for n, knot in enumerate(KNOTS) if self._seen[n] >= 0.5]

    def at(self, count: int) -> float:
        if count <= 0:
            return 0.0
        low, fraction = _PLACES[count] if count <= 512 else _place(count)
        values = self.values
        return values[low] + (values[low + 1] - values[low]) * fraction

    def learn(self, count: int, error: float, step: int) -> None:
        """Moves the knots around a count by the logarithm of (observed / expected)."""
        if count <= 0:
            return
        low, fraction = _PLACES[count] if count <= 512 else _place(count)
        fraction = min(fraction, 1.0)
        is_new = False
        before_s = self.at(count)
        for knot, weight in ((low, 1.0 - fraction), (low + 1, fraction)):
            if weight > 0.0:
                before = self._seen[knot]
                seen = self._weight(knot, step)
                is_new |= before < 0.5 <= seen + weight
                # Never unknown again: a value that is old is better than none.
                self._seen[knot] = max(min(before, 0.5), seen + weight)
                self._last[knot] = step
                self.values[knot] *= exp(error * weight * max(LEAST_RATE, 1.0 / (1.0 + seen)))
        high = low + 1 if fraction > 0.0 else low
        self._shift_forgotten(high, self.at(count) - before_s, step)
        self._keep_rising(low, high, step)
        self._since_fill += 1
        if is_new or self._since_fill >= REFILL_AFTER:
            self._fill()

    def _keep_rising(self, low: int, high: int, step: int) -> None:
        """Corrects the knots that contradict those just observed, which are `low` to `high`: fewer rows never take
        longer, nor more rows less. What was observed itself lately is hardly corrected."""
        values = self.values
        for at in range(low - 1, -1, -1):
            if values[at] <= values[at + 1]:
                break
            values[at] += (values[at + 1] - values[at]) / (1.0 + self._weight(at, step))
        for at in range(high + 1, len(values)):
            if values[at] >= values[at - 1]:
                break
            values[at] += (values[at - 1] - values[at]) / (1.0 + self._weight(at, step))

    def _weight(self, knot: int, step: int) -> float:
        """Weight of what was observed at a knot, and not forgotten since."""
        return self._seen[knot] * exp((self._last[knot] - step) / FORGOTTEN_AFTER)

    def _shift_forgotten(self, last: int, change_s: float, step: int) -> None:
        """Moves the knots above the `last` one just observed along with it, where they were not observed lately: what a
        further row costs should not change because only one number of rows is run for a while."""
        values = self.values
        for knot in range(last + 1, len(values)):
            weight = self._weight(knot, step)
            if weight >= 1.0:
                break
            values[knot] = max(0.1 * values[knot], values[knot] + (1.0 - weight) * change_s)

    def put(self, count: int, seconds: float, weight: float) -> None:
        """Sets the value of a knot, as if it had been observed `weight` times."""
        number = KNOTS.index(count)
        self.values[number], self._seen[number], self._last[number] = seconds, weight, 0
        self._fill()

    def _fill(self) -> None:
        """Gives knots that were not observed the shape's value, scaled as their observed neighbours are."""
        self._since_fill = 0
        shape, values = self._shape, self.values
        known = [n for n in range(len(KNOTS)) if self._seen[n] >= 0.5]
        if not known:
            return
        scales = [values[n] / shape[n] for n in known]
        slope = self._last_slope(known)
        for n in range(len(KNOTS)):
            if self._seen[n] >= 0.5:
                continue
            after = bisect_right(known, n)
            if after == 0:
                scale = scales[0]
            elif after == len(known):
                values[n] = values[known[-1]] + (KNOTS[n] - KNOTS[known[-1]]) * slope
                continue
            else:
                low, high = known[after - 1], known[after]
                fraction = (KNOTS[n] - KNOTS[low]) / (KNOTS[high] - KNOTS[low])
                scale = scales[after - 1] + (scales[after] - scales[after - 1]) * fraction
            values[n] = shape[n] * scale

    def _last_slope(self, known: Sequence[int]) -> float:
        """Seconds per count over the upper half of what was observed; at least none, at most in proportion."""
        last = known[-1]
        before = [n for n in known if 2 * KNOTS[n] <= KNOTS[last]]
        most = self.values[last] / KNOTS[last]
        if not before:
            return 0.5 * most
        rise = (self.values[last] - self.values[before[-1]]) / (KNOTS[last] - KNOTS[before[-1]])
        return min(most, max(0.0, rise))
