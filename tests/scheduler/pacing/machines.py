"""The pacer on synthetic machines: what it reaches, next to fixed numbers of drafts and to an oracle.

A machine is a set of cost curves with noise, which may change in the middle; requests differ in how well they are
drafted for, and drafters in how well they know it. Nothing else of a worker takes part. The oracle knows the true
costs, and before a step runs it knows which drafts will be accepted: no choice can do better.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log

from outrider.kv.footprint import KVFootprint, Proposing
from outrider.scheduler.pacing.costs import StepShape, StepTimes
from outrider.scheduler.pacing.curves import KNOTS
from outrider.scheduler.pacing.pacer import Pacer, RequestPace
from outrider.scheduler.pacing.worth import Proposed, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """True costs in seconds."""

    fixed_s: float
    """Reading the weights."""
    row_s: float
    """Arithmetic of one row, which the fixed part hides for the first rows."""
    hidden_rows: int
    draft_fixed_s: float
    draft_row_s: float
    feed_row_s: float
    host_s: float
    host_request_s: float
    noise: float = 0.05

    def target_s(self, rows: int) -> float:
        return self.fixed_s + self.row_s * max(0, rows - self.hidden_rows)

    def pass_s(self, rows: int) -> float:
        return self.draft_fixed_s + self.draft_row_s * rows if rows else 0.0

    def scaled(self, factor: float, draft_factor: float = 1.0) -> Machine:
        """Returns the same machine at another speed."""
        return Machine(
            fixed_s=self.fixed_s * factor,
            row_s=self.row_s * factor,
            hidden_rows=self.hidden_rows,
            draft_fixed_s=self.draft_fixed_s * factor * draft_factor,
            draft_row_s=self.draft_row_s * factor * draft_factor,
            feed_row_s=self.feed_row_s * factor,
            host_s=self.host_s * factor,
            host_request_s=self.host_request_s * factor,
            noise=self.noise,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is to be generated on a machine."""

    machine: Machine
    batch: int
    k: int
    skill: float
    """Mean probability that a draft is accepted after all before it."""
    spread: float
    """Standard deviation of the log-odds of that probability among requests, and among drafts."""
    overconfidence: float = 0.0
    """What the drafter adds to the log-odds of its probabilities."""
    chain: bool = False
    later: Machine | None = None
    """The machine from the middle of the run on; None if nothing changes."""
    later_skill: float | None = None

    @property
    def footprint(self) -> KVFootprint:
        return _CHAIN if self.chain else _BLOCK


class _ShapeOnly(KVFootprint):
    """Declares passes and rows of a drafter, without the KV that this simulation does not have."""

    __slots__ = ()

    def __post_init__(self) -> None:
        pass

    def passes(self, k: int) -> int:
        return 0 if not k else k if self.proposing is Proposing.CHAIN else 1

    def query_len(self, k: int) -> int:
        return 0 if not k else 1 if self.proposing is Proposing.CHAIN else k + 1


_CHAIN = _ShapeOnly(name="chain", proposing=Proposing.CHAIN)
_BLOCK = _ShapeOnly(name="block", proposing=Proposing.BLOCK)


def _odds(probability: float) -> float:
    return log(probability / (1.0 - probability))


def _probability(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))


@dataclass(slots=True)
class SimRequest:
    """A request that never ends."""

    ease: float
    """Shift of the log-odds of its drafts."""
    k: int
    pace: RequestPace | None = None
    drafts: int = 0
    wanted: int = 0
    context: int = 100
    accepted: int = 0
    """How many of its pending drafts the target would accept."""
    confident: list[float] = field(default_factory=list)
    """The drafter's probabilities of its pending drafts."""


Policy = Callable[[Sequence[SimRequest]], float]
"""Sets `drafts` and `wanted` of every request; returns the least confidence with which a chain goes on."""


class Run:
    """Steps of one load under one policy."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self._random = random.Random(seed)
        self.requests = [SimRequest(ease=self._random.gauss(0.0, load.spread), k=load.k) for _ in range(load.batch)]
        self.tokens = 0
        self.seconds = 0.0

    def run(self, steps: int, policy: Policy, pacer: Pacer | None = None) -> float:
        """Returns tokens per second."""
        load = self.load
        for step in range(steps):
            late = 2 * step >= steps
            machine = load.later if late and load.later is not None else load.machine
            skill = load.later_skill if late and load.later_skill is not None else load.skill
            going_on = policy(self.requests)
            self._step(machine, skill, going_on, pacer)
        return self.tokens / self.seconds

    def _step(self, machine: Machine, skill: float, going_on: float, pacer: Pacer | None) -> None:
        requests = self.requests
        rows = len(requests) + sum(request.drafts for request in requests)
        committed = 0
        for request in requests:
            accepted = min(request.accepted, request.drafts)
            if pacer is not None and request.drafts and request.pace is not None:
                pacer.verified(request.pace, drafts=request.drafts, accepted=accepted)
            committed += 1 + accepted
            request.context += 1 + accepted
        longest = [self._propose(request, skill, going_on, pacer) for request in requests]
        if self.load.chain:
            passes = tuple(sum(length > place for length in longest) for place in range(max(longest, default=0)))
        else:
            size = max((request.wanted for request in requests), default=0)
            asked = sum(request.wanted > 0 for request in requests)
            passes = (asked * (size + 1),) if asked else ()
        noise = exp(self._random.gauss(0.0, machine.noise))
        target_s = machine.target_s(rows) * noise
        draft_s = (machine.feed_row_s * committed + sum(map(machine.pass_s, passes))) * noise
        total_s = target_s + draft_s + (machine.host_s + machine.host_request_s * len(requests)) * noise
        self.tokens += committed
        self.seconds += total_s
        if pacer is not None:
            shape = StepShape(len(requests), rows, 0, committed, passes)
            pacer.observe(shape, StepTimes(target_s, draft_s, total_s), tokens=committed)

    def _propose(self, request: SimRequest, skill: float, going_on: float, pacer: Pacer | None) -> int:
        """Draws the next drafts of a request; returns how many there are."""
        load, drawn, joint, accepted, agrees = self.load, [], 1.0, 0, True
        for place in range(request.wanted):
            if load.chain and place and joint < going_on:
                break
            chance = _probability(_odds(skill) + request.ease + self._random.gauss(0.0, load.spread))
            confident = _probability(_odds(chance) + load.overconfidence)
            agrees = agrees and self._random.random() < chance
            accepted += agrees
            drawn.append(confident)
            shift = 0.0 if request.pace is None else request.pace.shifts.by_source[Source.DRAFTER]
            joint *= (
                confident if pacer is None else pacer.calibration.conditional(Source.DRAFTER, place, confident, shift)
            )
        request.accepted, request.drafts, request.confident = accepted, len(drawn), drawn
        if pacer is not None and request.pace is not None:
            found = None
            if drawn:
                shift = request.pace.shifts.by_source[Source.DRAFTER]
                found = Proposed(Source.DRAFTER, tuple(drawn), pacer.calibration.joint(Source.DRAFTER, drawn, shift))
            pacer.proposed(request.pace, found)
        return len(drawn)


def fixed(k: int) -> Policy:
    """Always proposes k drafts, and verifies all of them."""

    def policy(requests: Sequence[SimRequest]) -> float:
        for request in requests:
            request.wanted = k
        return 0.0

    return policy


def run_fixed(load: Load, seed: int, steps: int, k: int) -> float:
    return Run(load, seed).run(steps, fixed(k))


def run_paced(load: Load, seed: int, steps: int, pacer: Pacer | None = None, *, warm: bool = True) -> float:
    if pacer is None:
        pacer = Pacer(load.footprint, sizes=sizes_of(load))
    if warm:
        measure(load, pacer)
    run = Run(load, seed)
    for request in run.requests:
        request.pace = pacer.enter()

    def policy(requests: Sequence[SimRequest]) -> float:
        assert pacer is not None
        return pacer.begin(requests, prompt_rows=0).going_on

    return run.run(steps, policy, pacer)


def measure(load: Load, pacer: Pacer) -> None:
    """Teaches a pacer what steps cost, as the short measurement at start-up does."""
    machine = load.machine
    for count in KNOTS[:12]:
        # Twice as often as the first observation, which sets the speed.
        for rows in (count, count):
            draft_s = machine.pass_s(rows) + machine.feed_row_s * count
            host_s = machine.host_s + machine.host_request_s * count
            total_s = machine.target_s(count) + draft_s + host_s
            pacer.costs.observe(
                StepShape(count, count, 0, count, (rows,)), StepTimes(machine.target_s(count), draft_s, total_s)
            )
            feed_s = machine.feed_row_s * count
            pacer.costs.observe(
                StepShape(count, count, 0, count, ()),
                StepTimes(machine.target_s(count), feed_s, total_s - machine.pass_s(rows)),
            )


def sizes_of(load: Load) -> tuple[int, ...]:
    return tuple(range(1, load.k + 1)) if load.chain else tuple(sorted({max(1, load.k // 2), load.k}))


def run_oracle(load: Load, seed: int, steps: int) -> float:
    """The rate of one who proposes as many drafts as will be accepted, at true costs, for as many requests as pays."""
    best = 0.0
    for count in range(load.batch + 1):
        run = Run(load, seed)
        machine_run = _OracleRun(run, count)
        best = max(best, machine_run.rate(steps))
    return best


class _OracleRun:
    """Drafts for the luckiest `count` requests of each step, exactly as far as their drafts are accepted."""

    def __init__(self, run: Run, count: int) -> None:
        self._run, self._count = run, count

    def rate(self, steps: int) -> float:
        load, generator = self._run.load, random.Random(1)
        tokens, seconds = 0, 0.0
        for step in range(steps):
            late = 2 * step >= steps
            machine = load.later if late and load.later is not None else load.machine
            skill = load.later_skill if late and load.later_skill is not None else load.skill
            lucky = sorted((self._accepted(request, skill, generator) for request in self._run.requests), reverse=True)
            gains = [gain for gain in lucky[: self._count] if gain]
            gained = sum(gains)
            rows = load.batch + gained
            if load.chain:
                passes = [sum(gain > place for gain in gains) for place in range(max(gains, default=0))]
            else:
                passes = [len(gains) * 2] if gains else []
            tokens += load.batch + gained
            seconds += (
                machine.target_s(rows)
                + machine.feed_row_s * (load.batch + gained)
                + sum(map(machine.pass_s, passes))
                + machine.host_s
                + machine.host_request_s * load.batch
            )
        return tokens / seconds

    def _accepted(self, request: SimRequest, skill: float, generator: random.Random) -> int:
        spread = self._run.load.spread
        for place in range(request.k):
            if generator.random() >= _probability(_odds(skill) + request.ease + generator.gauss(0.0, spread)):
                return place
        return request.k
