"""The pacer of a scheduler: keeps what was learnt, and applies the choice to the requests of each step.

    begin       before a step is planned: which drafts it verifies, and for which requests it proposes
    verified    when a step is committed: which of the drafts were accepted
    proposed    when a step is committed: what was proposed for the next one
    observe     after a step: how long it took

Where drafting does not pay, a small part of the time goes into finding out whether it pays again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.kv.footprint import KVFootprint, Proposing
from outrider.scheduler.pacing.choice import ChainPasses, Drafting, choose_drafting, choose_verified
from outrider.scheduler.pacing.costs import StepCosts, StepShape, StepTimes
from outrider.scheduler.pacing.figures import Choice, PacingCounts
from outrider.scheduler.pacing.outlook import PRICES, Outlook, Policy, extended
from outrider.scheduler.pacing.worth import Calibration, Proposed, RequestShifts, Source

PROBING_PART = 0.005
"""Part of the time that goes into drafts which are not expected to pay."""
MOST_SAVED = 3.0
"""Most time that may be saved up for such drafts, in steps."""
SURPRISE = -0.2
"""Logarithm of (observed / expected) time from which on a step with drafts was surprisingly fast."""
PROBED_DRAFTS = 3
"""Number of drafts that are verified to find out whether drafting pays again."""
OWN_RATE, SHARED_RATE = 0.04, 0.02
"""Weight of the last proposal in the outlook of its request, and in that of all requests."""
RETURN_RATE = 0.04
"""How far the outlook of a request that is not drafted for returns to that of all requests, per choice: what its text
was like before says less and less about how it goes on."""
FIRST_OWN, FIRST_SHARED = 4, 8
"""Number of proposals that the first outlook counts for: at first an outlook learns faster than it does later."""
PAUSE_AFTER = 24
"""Least number of steps with drafts before one without."""
CHOOSE_EVERY = 8
"""Number of steps for which a choice of drafting requests holds while the requests stay the same."""
CALM_AFTER, CALM_EVERY = 16, 4
"""Number of plain steps in a row without a proposal until only every fourth one is learnt from, and the choice holds
four times as long: what is not drafted for should cost as little as possible."""
LOOKED_UP = (Source.OWN_TEXT, Source.SHARED_TEXT)
"""Sources whose worth changes for all requests at once, when users turn to other texts."""
MANY_REQUESTS = 8
"""Number of requests from which on those for which little was found lately are not looked up for at each step."""
QUIET_AFTER, QUIET_EVERY = 8, 4
"""Number of look-ups in a row that found nothing worth its rows until only every fourth step looks up."""
USUAL_CONTINUATION = 0.75
"""Mean probability that a draft is accepted if all before it are, until it is known."""
OBSERVED_RATE = 0.05
"""Weight of the last step in the observed tokens per second."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The terms of a step: what time and rows are worth."""

    rate: float
    """Tokens that a second is worth."""
    row_price: float
    """Tokens that the time of one more target row is worth."""
    going_on: float
    """Least joint probability of the drafts so far with which a chain makes another pass."""
    lookup: int
    """Most drafts that may be looked up for a request; 0 looks nothing up."""
    saves_lookups: bool
    """Whether requests for which little was found lately are looked up for now and then only."""
    draft_price: float
    """Tokens that the time of drafting for one request is worth."""
    outlook_at: int
    """Where a request's outlook has the policy by which the drafter proposes; -1 if it proposes for no request."""

    def drafter_value(self, request: RequestPace) -> float:
        """The tokens that drafting for a request is expected to gain, less what the drafter and the rows cost."""
        if self.outlook_at < 0:
            return 0.0
        drafts, accepted, _passes = request.outlook.values[self.outlook_at : self.outlook_at + 3]
        return accepted - self.row_price * drafts - self.draft_price

    @property
    def least_joint(self) -> float:
        """Least joint probability of a draft that may be worth verifying, even if rows become cheaper."""
        return 0.5 * self.row_price

    def value(self, joint: Sequence[float]) -> float:
        """The tokens that these drafts are expected to gain, less what their rows cost."""
        value = 0.0
        for probability in joint:
            if probability <= self.row_price:
                break
            value += probability - self.row_price
        return value


class RequestPace:
    """What the pacer knows of one request."""

    __slots__ = ("_quiet", "outlook", "pending", "probing", "proposals", "shifts")

    def __init__(self, outlook: Outlook) -> None:
        self.outlook = outlook
        self.shifts = RequestShifts()
        self.proposals = 0
        """Number of proposals that the outlook is made of."""
        self.pending: Proposed | None = None
        """The drafts that wait for verification; None if there are none, or if nothing is known of them."""
        self.probing = False
        """Whether the drafts that come next are verified whatever they are worth."""
        self._quiet = 0
        """Number of steps since something worth its rows was looked up."""

    def looks_up(self, pace: Pace) -> bool:
        """Whether to look up drafts at this step. Look-ups of many requests take a noticeable part of a step, which is
        lost where they find nothing, and a text that copies will still do so a few steps later."""
        self._quiet += 1
        return not pace.saves_lookups or self._quiet <= QUIET_AFTER or self._quiet % QUIET_EVERY == 0

    def looked_up(self, value: float) -> None:
        """Takes note of what the best drafts that were looked up are worth."""
        if value > 0.0:
            self._quiet = 0


class PacedRequest(Protocol):
    """What the pacer reads and sets of a request."""

    pace: RequestPace | None
    """None for a request whose number of drafts is fixed."""
    drafts: int
    wanted: int

    @property
    def k(self) -> int: ...

    @property
    def context(self) -> int: ...


class Pacer:
    def __init__(self, footprint: KVFootprint, *, sizes: Sequence[int], lookup: int = 0) -> None:
        """`sizes`: the numbers of drafts that are worth telling apart, ascending; the last one is the most, and without
        any the drafter is never asked. `lookup`: the most drafts that may be looked up for a request."""
        self.costs = StepCosts()
        self.calibration = Calibration()
        self.counts = PacingCounts()
        self.forced: tuple[int, int] | None = None
        """(drafts to verify, drafts to propose) for every request, while the costs of steps are measured."""
        self.last_seen: tuple[StepShape, StepTimes] | None = None
        """The last step."""
        self._observed = (0.0, 0.0)
        """Moving averages of (tokens, seconds) of a step without prompts."""
        self._footprint = footprint
        self._lookup = lookup
        self._asks_drafter = bool(sizes)
        sizes = tuple(sizes) or (1,)
        self._outlook = Outlook(sizes, chain=footprint.proposing is Proposing.CHAIN)
        """That of all requests."""
        self._probed = Policy(next((n for n, size in enumerate(sizes) if size >= PROBED_DRAFTS), len(sizes) - 1), 0)
        self._proposals = 0
        self._continuation = USUAL_CONTINUATION
        """Mean probability that a draft is accepted if all before it are."""
        self._rate = 0.0
        self._drafting = Drafting((), Policy(len(sizes) - 1, 3), rate=0.0, plain_rate=0.0)
        self._chosen: frozenset[RequestPace] = frozenset()
        self._chosen_for = -1
        self._choice_age = 0
        self._row_price = 0.0
        """Tokens that the time of one more target row was worth at the last step."""
        self._credit_s = 0.0
        self._probe_s = 0.0
        """Least credit for drafting for one more request; 0 where it has to be estimated again."""
        self._turn = 0
        self._since_pause = 0
        self._calm_steps = 0
        """Number of plain steps since the drafter proposed anything."""
        self._newcomers_k = sizes[-1] if self._asks_drafter else 0

    def reset(self) -> None:
        """Forgets everything but what steps cost: the requests so far were not a user's."""
        self.calibration.clear()
        self.counts = PacingCounts()
        self._outlook = Outlook(self._outlook.sizes, chain=self._outlook.chain)
        self._continuation = USUAL_CONTINUATION
        self.last_seen = None
        self._proposals = 0
        self._observed, self._rate, self._credit_s, self._chosen_for = (0.0, 0.0), 0.0, 0.0, -1
        self._drafting = Drafting((), Policy(len(self._outlook.sizes) - 1, 3), rate=0.0, plain_rate=0.0)
        self._chosen, self._choice_age, self._row_price = frozenset(), 0, 0.0
        self._turn = self._since_pause = self._calm_steps = 0
        self._newcomers_k = self._outlook.sizes[-1] if self._asks_drafter else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of drafts that it chooses from; none if the drafter is never asked."""
        return self._outlook.sizes if self._asks_drafter else ()

    # ---- requests ----------------------------------------------------------------------------------

    def enter(self) -> RequestPace:
        return RequestPace(self._outlook.copy())

    @property
    def observed_rate(self) -> float:
        """Tokens per second of the last steps without prompts; 0 before the first."""
        tokens, seconds = self._observed
        return tokens / seconds if seconds else 0.0

    @property
    def newcomers_k(self) -> int:
        """Number of drafts to propose for a request that has just computed its prompt."""
        return self._newcomers_k

    # ---- planning ----------------------------------------------------------------------------------

    def begin(self, decoding: Collection[PacedRequest], *, prompt_rows: int) -> Pace:
        """Sets how many drafts of each decoding request are verified, and how many are proposed for it."""
        paced: list[PacedRequest] = []
        rows, keys = prompt_rows, 0
        for request in decoding:
            rows += 1
            keys += request.context
            if request.pace is not None:
                paced.append(request)
            else:
                rows += request.drafts
        if self.forced is not None:
            return self._force(paced)
        count = len(decoding)
        if len(paced) != self._chosen_for or self._choice_age >= CHOOSE_EVERY * (CALM_EVERY if self._calm else 1):
            self._choose(paced, count, keys)
        self._choice_age += 1
        if self._pauses(paced):
            # Nothing is verified, and nothing proposed, to find out what that takes.
            for request in paced:
                request.drafts = request.wanted = 0
            return self._pace(rows, count)
        if any(request.drafts for request in paced):
            self._verify(paced, rows)
        size, chosen = self._size, self._chosen
        for request in paced:
            request.wanted = min(request.k, size) if request.pace in chosen else 0
        all_drafted = len(chosen) == len(paced) and self._drafting.policy.size == len(self._outlook.sizes) - 1
        if self._asks_drafter and not all_drafted:
            self._probe(paced, rows)
        return self._pace(rows, count)

    def _force(self, paced: Sequence[PacedRequest]) -> Pace:
        assert self.forced is not None
        verified, proposed = self.forced
        for request in paced:
            request.drafts, request.wanted = min(request.drafts, verified), min(request.k, proposed)
        self._newcomers_k = proposed
        return Pace(
            rate=1.0, row_price=0.0, going_on=0.0, lookup=0, saves_lookups=False, draft_price=0.0, outlook_at=-1
        )

    def _choose(self, paced: Sequence[PacedRequest], count: int, keys: int) -> None:
        """Chooses for which requests to propose from now on."""
        outlooks = [request.pace.outlook for request in paced if request.pace is not None]
        # Before the first request decodes, the choice is for one like all before it.
        committed, outlooks = (count, outlooks) if count else (1, [self._outlook])
        if not self._asks_drafter:
            outlooks = []
        costs, passes = self.costs, self._passes

        def step_s(many: int, drafts: float, gained: float, made: ChainPasses, policy: Policy) -> float:
            # Positions are fed and rows are run in whole numbers; on average, anything in between.
            target_s = costs.target_s(round(committed + drafts), committed, keys)
            fed = round(committed + gained) if self._footprint.groups else 0
            drafted_s = costs.draft_s(fed, ()) + passes(many, made, policy)
            return target_s + drafted_s + costs.host_s(committed, drafting=many > 0)

        last = self._drafting.policy
        if not self._rate or len(paced) != self._chosen_for:
            self._rate = committed / step_s(0, 0.0, 0.0, (), last)
            found = choose_drafting(outlooks, committed=committed, step_s=step_s, rate=self._rate, last=last)
            self._rate, last = found.rate, found.policy
        found = choose_drafting(outlooks, committed=committed, step_s=step_s, rate=self._rate, last=last)
        self._rate, self._drafting = found.rate, found
        age, self._chosen_for, self._choice_age, self._probe_s = self._choice_age, len(paced), 0, 0.0
        if count and self._asks_drafter:
            self._chosen = frozenset(pace for number in found.requests if (pace := paced[number].pace) is not None)
            for request in paced:
                if request.pace is not None and request.pace not in self._chosen:
                    request.pace.outlook.learn(self._outlook.values, RETURN_RATE * max(1.0, age / CHOOSE_EVERY))
        most = 2 * len(found.requests) > len(outlooks)
        self._newcomers_k = self._size if most else 0

    @property
    def _calm(self) -> bool:
        return self._calm_steps > CALM_AFTER

    @property
    def _size(self) -> int:
        """Most drafts to propose for the chosen requests."""
        return self._outlook.sizes[self._drafting.policy.size]

    def _passes(self, many: int, made: ChainPasses, policy: Policy) -> float:
        """Seconds of the drafter's passes that propose for so many requests. `made`: what passes a chain makes."""
        footprint, curve, speed = self._footprint, self.costs.draft, self.costs.speed
        if not many:
            return 0.0
        k = self._outlook.sizes[policy.size]
        if footprint.proposing is not Proposing.CHAIN:
            return speed * footprint.passes(k) * curve.at(many * footprint.query_len(k))
        return speed * sum(
            any_does * curve.at(round(mean / any_does)) for mean, any_does in made[:k] if any_does > 0.01
        )

    def _all_alike(self, many: int, policy: Policy) -> ChainPasses:
        """What passes a chain makes for so many requests that are like all."""
        if not self._outlook.chain:
            return ()
        first = self._outlook.passes_at(policy)
        makes = self._outlook.values[first : first + self._outlook.sizes[-1]]
        return [(many * each, 1.0 - (1.0 - each) ** many) for each in makes]

    def _verify(self, paced: Sequence[PacedRequest], rows: int) -> None:
        joint: list[Sequence[float]] = []
        base, offered = rows, 0
        for request in paced:
            pace = request.pace
            assert pace is not None
            if not request.drafts or pace.pending is None:
                # Nothing is known of drafts that came from another worker: all are verified.
                joint.append(())
                base += request.drafts
            elif pace.probing:
                # On top of what pays: rows that are never run would stay as expensive as they once were.
                request.drafts = min(request.drafts, PROBED_DRAFTS)
                joint.append(())
            else:
                joint.append(pace.pending.joint[: request.drafts])
                offered += request.drafts
        if not offered:
            return
        rows_s = self.costs.rows_s
        counts, _least = choose_verified(joint, base_rows=base, rows_s=rows_s, rate=self._rate)
        for request, verified, each in zip(paced, counts, joint, strict=True):
            if each:
                if not verified:
                    verified = self._look_again(request, base, rows_s(base + 1) - rows_s(base))
                request.drafts = verified

    def _look_again(self, request: PacedRequest, base: int, row_s: float) -> int:
        """Returns how many drafts to verify of those that are not expected to pay: looked-up ones are judged by what
        was accepted last, which is never found to have changed unless some are verified."""
        pending = request.pace.pending if request.pace is not None else None
        if pending is None or pending.source not in LOOKED_UP or self._credit_s < row_s:
            return 0
        self._credit_s -= row_s
        return 1

    def _pauses(self, paced: Sequence[PacedRequest]) -> bool:
        """Whether this step runs without drafts because few steps have lately: what is not observed is not known."""
        found = self._drafting
        if 2 * len(self._chosen) <= len(paced) or not found.rate or not found.plain_rate:
            self._since_pause = 0
            return False
        self._since_pause += 1
        if self._since_pause <= PAUSE_AFTER:
            return False
        # The drafts that wait have been paid for: without them, all that they would gain is lost. The next ones may
        # gain more than is expected, so that what they cost is not taken off.
        waiting = (request.pace.pending for request in paced if request.pace is not None)
        waiting_tokens = sum(sum(each.joint) for each in waiting if each is not None)
        next_tokens = len(self._chosen) * self._outlook.values[self._outlook.at(found.policy) + 1]
        lost_s = (waiting_tokens + next_tokens) / found.rate
        if not waiting_tokens or self._credit_s < lost_s:
            return False
        self._credit_s -= lost_s
        self._since_pause = 0
        self.counts.pauses += 1
        return True

    def _probe(self, paced: Sequence[PacedRequest], rows: int) -> None:
        """Tries what is not expected to pay, when enough time has been saved up: drafting for one more request, or more
        drafts for one."""
        if not paced or self._credit_s < self._probe_s:
            return
        sizes, size = self._outlook.sizes, self._outlook.sizes[self._probed.size]
        passes_s = self._passes(1, [(1.0, 1.0)] * size, self._probed)
        probe_s = self._probe_s = passes_s + self._more_rows_s(rows, PROBED_DRAFTS)
        if self._credit_s < probe_s:
            return
        self._turn += 1
        for offset in range(len(paced)):
            request = paced[(self._turn + offset) % len(paced)]
            pace = request.pace
            if pace is not None and pace not in self._chosen and not pace.probing:
                self._credit_s -= probe_s
                request.wanted, pace.probing = min(request.k, size), True
                self.counts.probes += 1
                return
        most_s = self._passes(1, [(1.0, 1.0)] * sizes[-1], Policy(len(sizes) - 1, 0))
        if self._drafting.policy.size < len(sizes) - 1 and self._credit_s >= most_s:
            self._credit_s -= most_s
            request = paced[self._turn % len(paced)]
            request.wanted = min(request.k, sizes[-1])

    def _more_rows_s(self, rows: int, more: int) -> float:
        return self.costs.rows_s(rows + more) - self.costs.rows_s(rows)

    def _pace(self, rows: int, count: int) -> Pace:
        rate = self._rate
        span = max(4, count)
        row_s = self._more_rows_s(rows, span) / span
        self._row_price = rate * row_s
        found = self._drafting
        many, at = len(found.requests), self._outlook.at(found.policy)
        passes_s = self._passes(many, self._all_alike(many, found.policy), found.policy)
        return Pace(
            rate=rate,
            row_price=self._row_price,
            going_on=PRICES[found.policy.price],
            lookup=self._lookup,
            saves_lookups=count >= MANY_REQUESTS,
            draft_price=rate * passes_s / many if many else 0.0,
            outlook_at=at if many else -1,
        )

    # ---- what came of it ---------------------------------------------------------------------------

    def verified(self, request: RequestPace, *, drafts: int, accepted: int) -> None:
        """Learns from a verification; `accepted` of the first `drafts` drafts agreed with the target."""
        pending, request.pending, request.probing = request.pending, None, False
        if pending is None:
            return
        self.counts.verified_by_source[pending.source] += drafts
        self.counts.accepted_by_source[pending.source] += accepted
        before = 1.0
        for place in range(min(drafts, accepted + 1, len(pending.probabilities))):
            agreed = place < accepted
            probability = pending.probabilities[place]
            now = pending.joint[place] / before if before > 0.0 else 0.0
            self.calibration.observe(pending.source, place, probability, accepted=agreed)
            if pending.source in LOOKED_UP:
                self.calibration.shift(pending.source, now, accepted=agreed)
            request.shifts.observe(pending.source, now, accepted=agreed)
            before = pending.joint[place]

    def proposed(self, request: RequestPace, proposed: Proposed | None) -> None:
        """Takes note of what was proposed for the next step."""
        request.pending = proposed
        if proposed is None:
            request.probing = False
            return
        self.counts.offered_by_source[proposed.source] += len(proposed.joint)
        if proposed.source is not Source.DRAFTER:
            return
        self._calm_steps = 0
        joint, sizes = proposed.joint, self._outlook.sizes
        if len(joint) > 1 and joint[0] > 0.0:
            per_place = (joint[-1] / joint[0]) ** (1.0 / (len(joint) - 1))
            self._continuation += SHARED_RATE * (per_place - self._continuation)
        found = self._outlook.of(extended(joint, sizes[-1], self._continuation))
        request.proposals += 1
        self._proposals += 1
        request.outlook.learn(found, max(OWN_RATE, 1.0 / (FIRST_OWN + request.proposals)))
        self._outlook.learn(found, max(SHARED_RATE, 1.0 / (FIRST_SHARED + self._proposals)))

    def observe(self, shape: StepShape, times: StepTimes, *, tokens: int) -> None:
        """Learns from how long a step took. Its `tokens` were committed."""
        self.last_seen = shape, times
        if self.forced is not None:
            return
        if self._chosen_for > 0:
            self._credit_s = min(self._credit_s + PROBING_PART * times.total_s, MOST_SAVED * times.total_s)
        if shape.prompt_rows or not tokens or times.total_s <= 0.0:
            return
        if shape.passes or shape.rows > shape.requests:
            self.counts.drafting_steps += 1
            if self.costs.observe(shape, times) < SURPRISE:
                # Drafts have become cheaper than they were: it is worth looking again at once.
                self._credit_s = max(self._credit_s, times.total_s)
        else:
            self.counts.plain_steps += 1
            self._calm_steps += 1
            if not self._calm or self._calm_steps % CALM_EVERY == 0:
                self.costs.observe(shape, times)
        rate = OBSERVED_RATE if self._observed[1] else 1.0
        before, before_s = self._observed
        self._observed = before + rate * (tokens - before), before_s + rate * (times.total_s - before_s)

    def describe(self) -> Choice:
        """What is chosen just now and why, for people."""
        return Choice(
            rate=self._drafting.rate,
            plain_rate=self._drafting.plain_rate,
            observed_rate=self.observed_rate,
            drafting_requests=len(self._drafting.requests),
            drafts=self._size if self._drafting.requests else 0,
            least_probability=PRICES[self._drafting.policy.price],
            row_price=self._row_price,
            speed=self.costs.speed,
        )
