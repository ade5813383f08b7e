"""What a step costs, learnt from the steps themselves.

    target    S * (target(rows) + per_request * requests + per_key * context lengths of all requests)
    draft     S * (feed(fed positions) + sum of draft(rows) over the drafter's passes)
    host      S * host(requests)        all that is left of the step: planning, looking up, handing out; with a curve
                                        of its own for steps that propose or verify

S is the speed of the machine just now. It follows a busy neighbour or a change of the clock within some ten steps, and
carries what it learns over to all that was not observed since; the curves follow slowly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

from outrider.scheduler.pacing.curves import KNOTS, Curve

SPEED_RATE = 0.06
"""Weight of the last step in the speed of the machine."""
LARGEST_ERROR = 0.5
"""Largest logarithm of (observed / expected) that a single step may teach: a step may be held up by anything."""
LINEAR_RATE = 0.02
"""Weight of the last step in the costs per request and per key, where these make up all of a step."""


class StepShape(NamedTuple):
    """What a step had to do."""

    requests: int
    rows: int
    """Rows of the target."""
    keys: int
    """Context lengths of all requests: the rows of a request read the same keys."""
    fed: int
    """Positions that the drafter was fed."""
    passes: tuple[int, ...]
    """Rows in each of the drafter's passes that proposed."""
    prompt_rows: int = 0
    """How many of the target's rows computed prompts, or ran again for a drafter that catches up."""


class StepTimes(NamedTuple):
    """How long the parts of a step took."""

    target_s: float
    """Running the target and sampling from it."""
    draft_s: float
    """Feeding the drafter, and proposing."""
    total_s: float


@dataclass(frozen=True, slots=True)
class CostRecord:
    """Costs as they are kept on disk."""

    curves: Mapping[str, Sequence[tuple[int, float]]]
    per_request_s: float
    per_key_s: float


class StepCosts:
    def __init__(self) -> None:
        # Only the proportions count until the first step sets the speed: reading weights, plus arithmetic for each row.
        self.target = Curve([1e-3 * (1 + 0.06 * knot) for knot in KNOTS])
        self.draft = Curve([3e-4 * (1 + 0.06 * knot) for knot in KNOTS])
        self.feed = Curve([5e-5 * (1 + 0.1 * knot) for knot in KNOTS])
        self.host = Curve([5e-5 * (1 + 0.5 * knot) for knot in KNOTS])
        self.drafting_host = Curve([6e-5 * (1 + 0.5 * knot) for knot in KNOTS])
        self.per_request_s = 0.0
        self.per_key_s = 0.0
        self.speed = 1.0
        """Factor of all times: above 1 where the machine is slower than when the curves were learnt."""
        self._observed = False
        self._steps = 0

    @property
    def curves(self) -> dict[str, Curve]:
        return {
            "target": self.target,
            "draft": self.draft,
            "feed": self.feed,
            "host": self.host,
            "drafting_host": self.drafting_host,
        }

    # ---- expectations ------------------------------------------------------------------------------

    def target_s(self, rows: int, requests: int, keys: float) -> float:
        return self.speed * (self.target.at(rows) + self.per_request_s * requests + self.per_key_s * keys)

    def rows_s(self, rows: int) -> float:
        """The part of the target's time that grows with its rows."""
        return self.speed * self.target.at(rows)

    def draft_s(self, fed: int, passes: Iterable[int]) -> float:
        return self.speed * (self.feed.at(fed) + sum(map(self.draft.at, passes)))

    def host_s(self, requests: int, *, drafting: bool) -> float:
        return self.speed * (self.drafting_host if drafting else self.host).at(requests)

    # ---- observations ------------------------------------------------------------------------------

    def observe(self, shape: StepShape, times: StepTimes) -> float:
        """Learns from a step that had no rows of prompts. Returns the logarithm of (observed / expected)."""
        host_s = max(1e-7, times.total_s - times.target_s - times.draft_s)
        expected = self.target_s(shape.rows, shape.requests, shape.keys)
        drafted = self.draft_s(shape.fed, shape.passes)
        drafting = shape.rows > shape.requests or bool(shape.passes)
        hosted = self.host_s(shape.requests, drafting=drafting)
        self._steps += 1
        if not self._observed:
            self._observed = True
            self._adopt(times.total_s / (expected + drafted + hosted))
            return 0.0
        overall = _error(times.total_s, expected + drafted + hosted)
        self.speed *= exp(SPEED_RATE * overall)
        self._learn_target(shape, _error(times.target_s, expected))
        if drafted and times.draft_s:
            self._learn_draft(shape, _error(times.draft_s, drafted))
        curve = self.drafting_host if drafting else self.host
        curve.learn(shape.requests, _error(host_s, hosted), self._steps)
        return overall

    def _learn_target(self, shape: StepShape, error: float) -> None:
        curve = self.target.at(shape.rows)
        requests, keys = self.per_request_s * shape.requests, self.per_key_s * shape.keys
        whole = curve + requests + keys
        self.target.learn(shape.rows, error * curve / whole, self._steps)
        self.per_request_s *= exp(LINEAR_RATE * error * requests / whole)
        self.per_key_s *= exp(LINEAR_RATE * error * keys / whole)

    def _learn_draft(self, shape: StepShape, error: float) -> None:
        fed, passes = self.feed.at(shape.fed), sum(map(self.draft.at, shape.passes))
        whole = fed + passes
        self.feed.learn(shape.fed, error * fed / whole, self._steps)
        for rows in shape.passes:
            self.draft.learn(rows, error * passes / whole / len(shape.passes), self._steps)

    def _adopt(self, speed: float) -> None:
        """Takes the speed of the first step as that of the curves."""
        for curve in self.curves.values():
            curve.values[:] = [value * speed for value in curve.values]

    def seconds(self) -> dict[str, list[tuple[int, float]]]:
        """Seconds by count for each curve where it was observed, at the speed that the machine has now."""
        return {
            name: [(knot, value * self.speed) for knot, value in curve.observed] for name, curve in self.curves.items()
        }

    # ---- on disk -----------------------------------------------------------------------------------

    def record(self) -> CostRecord:
        """The costs as they are now, at the speed that the machine has now."""
        return CostRecord(self.seconds(), self.per_request_s * self.speed, self.per_key_s * self.speed)

    def restore(self, record: CostRecord, *, weight: float) -> None:
        """Starts from costs that were measured before, as if from `weight` observations of each."""
        self._steps = 0
        for name, values in record.curves.items():
            for knot, seconds in values:
                self.curves[name].put(knot, seconds, weight)
        self.per_request_s, self.per_key_s = record.per_request_s, record.per_key_s
        self.speed, self._observed = 1.0, True


def _error(observed_s: float, expected_s: float) -> float:
    """The logarithm of (observed / expected), within bounds."""
    if observed_s <= 0.0 or expected_s <= 0.0:
        return 0.0
    return min(LARGEST_ERROR, max(-LARGEST_ERROR, log(observed_s / expected_s)))
