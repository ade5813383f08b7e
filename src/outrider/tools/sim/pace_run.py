"""Runs of a synthetic load: with a fixed number of drafts, at the pacer's pace, and as an oracle would.

A step verifies the drafts that the step before it proposed. Requests never end. Nothing of a worker takes part but the
pacer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.scheduler.pacing.costs import StepShape, StepTimes
from outrider.scheduler.pacing.pacer import Pace, Pacer, RequestPace
from outrider.scheduler.pacing.worth import Proposed, Source
from outrider.tools.sim.pace_load import Drawn, Load, Machine, Tape

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows that are measured at start-up."""


@dataclass(slots=True)
class SimRequest:
    k: int
    pace: RequestPace | None = None
    drafts: int = 0
    wanted: int = 0
    context: int = 100
    accepted: int = 0
    """How many of its pending drafts the target would accept."""


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: int
    seconds: float


class Run:
    """Steps of one load. A subclass sets `wanted` of every request before a step, and says what is proposed."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.requests = [SimRequest(k=tape.load.k) for _ in range(tape.load.batch)]

    def steps(self) -> list[StepResult]:
        return [self._step(step) for step in range(self.tape.steps)]

    def begin(self) -> None:
        """Sets how many drafts are verified and proposed."""
        raise NotImplementedError

    def verified(self, request: SimRequest, accepted: int) -> None:
        """Takes note of what was accepted."""

    def propose(self, request: SimRequest, drawn: Drawn) -> int:
        """Sets the request's next drafts; returns how many of them the drafter proposed."""
        request.drafts, request.accepted = request.wanted, drawn.accepted
        return request.wanted

    def observe(self, shape: StepShape, times: StepTimes, tokens: int) -> None:
        """Takes note of how long a step took."""

    def _step(self, step: int) -> StepResult:
        tape, requests = self.tape, self.requests
        self.begin()
        rows, committed = len(requests), 0
        for request in requests:
            accepted = min(request.accepted, request.drafts)
            rows += request.drafts
            self.verified(request, accepted)
            committed += 1 + accepted
            request.context += 1 + accepted
        asked = [
            (request.wanted, self.propose(request, drawn))
            for request, drawn in zip(requests, tape.drawn[step], strict=True)
        ]
        passes = _passes(tape.load, [(wanted, length) for wanted, length in asked if length])
        machine, (target_noise, noise) = tape.machine(step), tape.noise[step]
        target_s = machine.target_s(rows) * target_noise
        draft_s = (machine.feed_row_s * committed + sum(map(machine.pass_s, passes))) * noise
        total_s = target_s + draft_s + machine.host_time_s(len(requests)) * noise
        shape = StepShape(len(requests), rows, 0, committed, passes)
        self.observe(shape, StepTimes(target_s, draft_s, total_s), committed)
        return StepResult(committed, total_s)


def _passes(load: Load, asked: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the rows of each pass, given (drafts wanted, drafts proposed) of the requests that were asked for."""
    if not asked:
        return ()
    if not load.chain:
        return (len(asked) * (1 + max(wanted for wanted, _length in asked)),)
    longest = max(length for _wanted, length in asked)
    return tuple(sum(length > place for _wanted, length in asked) for place in range(longest))


class FixedRun(Run):
    """Always proposes k drafts, and verifies all of them."""

    def __init__(self, tape: Tape, k: int) -> None:
        super().__init__(tape)
        self._k = k

    def begin(self) -> None:
        for request in self.requests:
            request.wanted = self._k


class PacedRun(Run):
    """Proposes and verifies as a pacer says, and looks up as a runner does."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        load = tape.load
        self.pacer = Pacer(load.footprint, sizes=load.sizes, lookup=2 * load.k if load.copied else 0)
        measure(load.machine, self.pacer)
        for request in self.requests:
            request.pace = self.pacer.enter()
        self._pace: Pace | None = None

    def begin(self) -> None:
        self._pace = self.pacer.begin(self.requests, prompt_rows=0)

    def verified(self, request: SimRequest, accepted: int) -> None:
        if request.drafts and request.pace is not None:
            self.pacer.verified(request.pace, drafts=request.drafts, accepted=accepted)

    def observe(self, shape: StepShape, times: StepTimes, tokens: int) -> None:
        self.pacer.observe(shape, times, tokens=tokens)

    def propose(self, request: SimRequest, drawn: Drawn) -> int:
        pace, own = self._pace, request.pace
        assert pace is not None
        assert own is not None
        copied = self._calibrated(own, Source.OWN_TEXT, drawn.copied_confident) if drawn.copied_confident else None
        asks = request.wanted > 0
        if copied is not None and asks and not own.probing:
            asks = pace.value(copied.joint) < pace.drafter_value(own)
        found = self._ask_drafter(request, own, drawn) if asks else None
        length = 0 if found is None else len(found.probabilities)
        request.accepted = drawn.accepted
        if copied is not None and (found is None or pace.value(copied.joint) > pace.value(found.joint)):
            found, request.accepted = copied, drawn.copied_accepted
        request.drafts = 0 if found is None else len(found.probabilities)
        self.pacer.proposed(own, found)
        return length

    def _ask_drafter(self, request: SimRequest, own: RequestPace, drawn: Drawn) -> Proposed:
        assert self._pace is not None
        found = self._calibrated(own, Source.DRAFTER, drawn.confident[: request.wanted])
        if not self.tape.load.chain:
            return found
        ends = (place for place, joint in enumerate(found.joint, start=1) if joint < self._pace.going_on)
        count = next(ends, request.wanted)
        return Proposed(found.source, found.probabilities[:count], found.joint[:count])

    def _calibrated(self, own: RequestPace, source: Source, probabilities: tuple[float, ...]) -> Proposed:
        shift = own.shifts.by_source[source]
        return Proposed(source, probabilities, self.pacer.calibration.joint(source, probabilities, shift))


def measure(machine: Machine, pacer: Pacer) -> None:
    """Teaches a pacer what steps cost, as the short measurement at start-up does."""
    for count in MEASURED_ROWS:
        # Twice, since the first observation of all only sets the speed.
        for passes in ((count,), (), (count,), ()):
            target_s = machine.target_s(count)
            draft_s = sum(map(machine.pass_s, passes)) + machine.feed_row_s * count
            times = StepTimes(target_s, draft_s, target_s + draft_s + machine.host_time_s(count))
            pacer.costs.observe(StepShape(count, count, 0, count, passes), times)


def rate(results: Sequence[StepResult], measured: Collection[int]) -> float:
    """Returns the tokens per second of some of the steps."""
    tokens = sum(results[step].tokens for step in measured)
    return tokens / sum(results[step].seconds for step in measured)


Choice = tuple[int, float]
"""(drafts that are verified and all accepted, seconds)."""


class Oracle:
    """The largest rate that any choice can reach on a tape: it knows the costs and the noise of every step, and which
    drafts will be accepted. It asks for these only, and verifies these only."""

    def __init__(self, tape: Tape, measured: Collection[int]) -> None:
        self._tape = tape
        self._measured = frozenset(measured)
        self._choices = [self._of_step(step) for step in range(-1, tape.steps - 1)]

    def rate(self) -> float:
        """Maximizes tokens / seconds by maximizing tokens - rate * seconds at each step (Dinkelbach's method)."""
        found = 0.0
        while True:
            tokens, seconds = 0, 0.0
            for choices in self._choices:
                gained, spent_s = max(choices, key=lambda choice: choice[0] - found * choice[1])
                tokens, seconds = tokens + gained, seconds + spent_s
            if tokens / seconds <= found * (1.0 + 1e-9):
                return tokens / seconds
            found = tokens / seconds

    def _of_step(self, step: int) -> list[Choice]:
        """Returns what can be made of the drafts that one step proposes and the next one verifies: what the next one
        yields and takes, and what drafting takes."""
        tape, later = self._tape, step + 1
        batch, machine = tape.load.batch, tape.machine(later)
        counts = later in self._measured
        target_noise, noise = tape.noise[later]
        choices = []
        for drafts, draft_s in self._proposals(step):
            if not counts:
                gained, spent_s = 0, 0.0
            else:
                gained = batch + drafts
                spent_s = machine.target_s(gained) * target_noise
                spent_s += (machine.feed_row_s * gained + machine.host_time_s(batch)) * noise
            drafting_counts = step in self._measured
            choices.append((gained, spent_s + (draft_s if drafting_counts else 0.0)))
        return choices

    def _proposals(self, step: int) -> list[Choice]:
        """Returns how many right drafts a step may propose, and the least seconds that they can take."""
        if step < 0:
            return [(0, 0.0)]
        tape, load = self._tape, self._tape.load
        machine, noise, drawn = tape.machine(step), tape.noise[step][1], tape.drawn[step]
        copied = sum(each.copied_accepted for each in drawn)
        found: list[Choice] = [(drafts, 0.0) for drafts in range(copied + 1)]
        if load.chain:
            for depth in range(1, load.k + 1):
                most = sum(max(each.copied_accepted, min(each.accepted, depth)) for each in drawn)
                for drafts in range(copied + 1, most + 1):
                    seconds = depth * machine.draft_fixed_s + machine.draft_row_s * (drafts - copied)
                    found.append((drafts, seconds * noise))
            return found
        for size in load.sizes:
            more = sorted((max(0, min(each.accepted, size) - each.copied_accepted) for each in drawn), reverse=True)
            done = copied
            for number, gain in enumerate(more, start=1):
                seconds = machine.pass_s(number * (size + 1)) * noise
                found += [(drafts, seconds) for drafts in range(done + 1, done + gain + 1)]
                done += gain
        return found
