"""The pacer: what it sets for each request of a step, and what it makes of what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from outrider.kv.archetypes import DrafterShape, chain_from_tokens, heads
from outrider.kv.footprint import NO_DRAFTER, GroupSpec
from outrider.kv.groups import group_kind
from outrider.scheduler.pacing.costs import StepCosts, StepShape, StepTimes
from outrider.scheduler.pacing.outlook import Outlook
from outrider.scheduler.pacing.pacer import (
    CALM_AFTER,
    CALM_EVERY,
    CHOOSE_EVERY,
    MANY_REQUESTS,
    MOST_SAVED,
    PROBED_DRAFTS,
    PROBING_PART,
    QUIET_AFTER,
    Pacer,
    RequestPace,
)
from outrider.scheduler.pacing.worth import Calibration, Proposed, RequestShifts, Source
from outrider.tools.sim.pace_campaign import CHANGING_LOADS
from outrider.tools.sim.pace_load import Tape
from outrider.tools.sim.pace_run import PacedRun

GROUP = GroupSpec(name="draft", kind=group_kind("full", {}), page_tokens=4)
CHAIN = chain_from_tokens("chain", DrafterShape(groups=(GROUP,)))
K = 4


@dataclass
class FakeRequest:
    pace: RequestPace | None
    k: int = K
    drafts: int = 0
    wanted: int = -1
    context: int = 50


def chain_pacer() -> Pacer:
    return Pacer(CHAIN, sizes=range(1, K + 1))


class Decoding:
    """Steps of some requests on a machine with constant costs, whose drafts are accepted with the probability that the
    drafter gives, rounded to always or never."""

    def __init__(self, pacer: Pacer, count: int, *, row_s: float, pass_s: float, joint: tuple[float, ...]) -> None:
        self.pacer = pacer
        self.requests = [FakeRequest(pacer.enter()) for _ in range(count)]
        self.row_s, self.pass_s, self.joint = row_s, pass_s, joint
        self.seconds, self.spent_on_drafts_s = 0.0, 0.0

    def step(self) -> None:
        pacer, requests = self.pacer, self.requests
        pacer.begin(requests, prompt_rows=0)
        rows = len(requests) + sum(request.drafts for request in requests)
        tokens = 0
        for request in requests:
            assert request.pace is not None
            right = sum(probability > 0.5 for probability in self.joint[: request.drafts])
            if request.drafts:
                pacer.verified(request.pace, drafts=request.drafts, accepted=right)
            tokens += 1 + right
            request.drafts = request.wanted
            joint = self.joint[: request.wanted]
            pacer.proposed(request.pace, Proposed(Source.DRAFTER, joint, joint) if joint else None)
        wanted = [request.wanted for request in requests]
        passes = tuple(sum(each > place for each in wanted) for place in range(max(wanted)))
        target_s = 1.0 + self.row_s * (rows - len(requests))
        draft_s = self.pass_s * len(passes)
        self.seconds += target_s + draft_s + 0.1
        self.spent_on_drafts_s += target_s - 1.0 + draft_s
        shape = StepShape(len(requests), rows, 0, 0, passes)
        pacer.observe(shape, StepTimes(target_s, draft_s, target_s + draft_s + 0.1), tokens=tokens)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def test_good_drafts_that_cost_little_are_proposed_and_verified_for_all() -> None:
    decoding = Decoding(chain_pacer(), 3, row_s=0.001, pass_s=0.01, joint=(0.95, 0.9, 0.85, 0.8))
    decoding.run(60)
    decoding.pacer.begin(decoding.requests, prompt_rows=0)
    assert [request.wanted for request in decoding.requests] == [K] * 3
    assert [request.drafts for request in decoding.requests] == [K] * 3
    assert decoding.pacer.newcomers_k == K


def test_drafts_that_do_not_pay_are_only_probed_within_their_part_of_the_time() -> None:
    decoding = Decoding(chain_pacer(), 4, row_s=0.3, pass_s=0.2, joint=(0.2, 0.04, 0.01, 0.0))
    decoding.run(100)
    decoding.seconds = decoding.spent_on_drafts_s = 0.0
    before = decoding.pacer.counts.probes
    decoding.run(2000)
    assert decoding.pacer.counts.probes > before
    assert decoding.spent_on_drafts_s <= 1.1 * PROBING_PART * decoding.seconds
    assert decoding.pacer.newcomers_k == 0


def test_a_drafter_that_becomes_good_is_noticed() -> None:
    decoding = Decoding(chain_pacer(), 2, row_s=0.02, pass_s=0.05, joint=(0.04, 0.0, 0.0, 0.0))
    decoding.run(300)
    assert [request.wanted for request in decoding.requests] != [K, K]
    decoding.joint = (0.95, 0.9, 0.85, 0.8)
    decoding.run(3000)
    assert decoding.pacer.newcomers_k >= 3


def test_a_probe_verifies_few_drafts_whatever_they_are_worth() -> None:
    pacer = chain_pacer()
    pace = pacer.enter()
    pace.pending, pace.probing = Proposed(Source.DRAFTER, (0.1,) * K, (0.01,) * K), True
    request = FakeRequest(pace, drafts=K)
    pacer.begin([request], prompt_rows=0)
    assert request.drafts == min(K, PROBED_DRAFTS)


def test_probes_go_round_all_requests() -> None:
    decoding = Decoding(chain_pacer(), 4, row_s=0.3, pass_s=0.2, joint=(0.2, 0.04, 0.01, 0.0))
    decoding.run(100)
    probed = set()
    for _ in range(3000):
        decoding.step()
        probed |= {number for number, request in enumerate(decoding.requests) if request.wanted}
    assert probed == {0, 1, 2, 3}


@pytest.mark.parametrize("verified", [True, False])
def test_a_probe_ends_when_its_drafts_are_verified_or_when_there_are_none(verified: bool) -> None:
    pacer = chain_pacer()
    pace = pacer.enter()
    pace.probing = True
    if verified:
        pace.pending = Proposed(Source.DRAFTER, (0.1,), (0.1,))
        pacer.verified(pace, drafts=1, accepted=0)
    else:
        pacer.proposed(pace, None)
    assert not pace.probing


def test_a_pass_that_has_become_cheap_is_followed_by_another_probe_at_once() -> None:
    decoding = Decoding(chain_pacer(), 2, row_s=0.15, pass_s=0.15, joint=(0.04, 0.0, 0.0, 0.0))
    decoding.run(300)
    # Steps without drafts take as long as before.
    decoding.row_s = decoding.pass_s = 0.0
    before = decoding.pacer.counts.probes
    while decoding.pacer.counts.probes == before:
        decoding.step()
    decoding.run(3)
    assert decoding.pacer.counts.probes > before + 1


def test_now_and_then_nothing_is_drafted_though_it_pays() -> None:
    """What a step without drafts takes is not known otherwise."""
    decoding = Decoding(chain_pacer(), 3, row_s=0.001, pass_s=0.01, joint=(0.95, 0.9, 0.85, 0.8))
    decoding.run(3000)
    counts = decoding.pacer.counts
    assert 0 < counts.pauses < 30
    assert counts.plain_steps >= counts.pauses


def test_what_a_text_was_like_before_is_forgotten_while_it_is_not_drafted_for() -> None:
    """The others are drafted for all the time, and this one only now and then, to find out."""
    pacer = chain_pacer()
    decoding = Decoding(pacer, 6, row_s=0.2, pass_s=0.1, joint=(0.95, 0.9, 0.85, 0.8))
    decoding.run(100)
    bad = decoding.requests[-1]
    assert bad.pace is not None
    bad.pace.outlook.values = [0.0] * len(bad.pace.outlook.values)
    decoding.run(12)
    assert bad.wanted == 0
    decoding.run(60)
    assert sum(bad.pace.outlook.values) > 0.2 * sum(pacer.enter().outlook.values)


def test_steps_that_compute_prompts_teach_nothing_about_others() -> None:
    pacer = chain_pacer()
    pacer.observe(StepShape(1, 65, 0, 0, (), prompt_rows=64), StepTimes(9.0, 0.0, 9.1), tokens=1)
    assert pacer.observed_rate == 0.0
    assert pacer.costs.curves["target"].observed == []
    assert pacer.counts.plain_steps == pacer.counts.drafting_steps == 0


def test_every_draft_is_judged_by_its_probability_given_those_before_it() -> None:
    pacer, expected = chain_pacer(), RequestShifts()
    pace = pacer.enter()
    pace.pending = Proposed(Source.DRAFTER, (0.5, 0.5, 0.5), (0.5, 0.25, 0.125))
    pacer.verified(pace, drafts=3, accepted=3)
    for _ in range(3):
        expected.observe(Source.DRAFTER, 0.5, accepted=True)
    assert pace.shifts.by_source == expected.by_source


def test_drafts_of_which_nothing_is_known_are_all_verified() -> None:
    """They came with a request from another worker."""
    pacer = chain_pacer()
    request = FakeRequest(pacer.enter(), drafts=K)
    pacer.begin([request], prompt_rows=0)
    assert request.drafts == K


@pytest.mark.parametrize("forced", [None, (1, 2)])
def test_requests_with_a_fixed_number_of_drafts_are_left_alone(forced: tuple[int, int] | None) -> None:
    pacer = chain_pacer()
    pacer.forced = forced
    fixed = FakeRequest(None, drafts=3, wanted=3)
    paced = FakeRequest(pacer.enter(), drafts=2)
    for _ in range(5):
        pacer.begin([fixed, paced], prompt_rows=7)
        assert (fixed.drafts, fixed.wanted) == (3, 3)
        assert 0 <= paced.wanted <= K


def test_forced_numbers_hold_within_what_there_is() -> None:
    pacer = chain_pacer()
    pacer.forced = (2, 9)
    few, many = FakeRequest(pacer.enter(), drafts=1), FakeRequest(pacer.enter(), k=3, drafts=4)
    pace = pacer.begin([few, many], prompt_rows=0)
    assert [(each.drafts, each.wanted) for each in (few, many)] == [(1, K), (2, 3)]
    assert pace.lookup == 0
    assert pacer.newcomers_k == 9


def test_nothing_that_is_forced_is_learnt_from() -> None:
    pacer = chain_pacer()
    pacer.forced = (0, 0)
    shape, times = StepShape(1, 1, 0, 0, ()), StepTimes(1.0, 0.0, 2.0)
    pacer.observe(shape, times, tokens=1)
    assert pacer.last_seen == (shape, times)
    assert pacer.observed_rate == 0.0
    assert pacer.costs.curves["target"].observed == []


def test_without_a_drafter_nothing_is_asked_for_and_look_ups_go_on() -> None:
    pacer = Pacer(NO_DRAFTER, sizes=(), lookup=9)
    assert pacer.sizes == ()
    assert pacer.newcomers_k == 0
    request = FakeRequest(pacer.enter(), k=9)
    for step in range(200):
        pace = pacer.begin([request], prompt_rows=0)
        assert (request.wanted, pace.lookup, pace.outlook_at) == (0, 9, -1)
        pacer.observe(StepShape(1, 1, 0, 0, ()), StepTimes(1.0, 0.0, 1.1), tokens=1)
        request.drafts = 0
        assert pacer.counts.probes == 0, step


def test_look_ups_that_failed_are_tried_again_now_and_then() -> None:
    """What a look-up is worth is known from verifying what it finds."""
    pacer = Pacer(NO_DRAFTER, sizes=(), lookup=9)
    request = FakeRequest(pacer.enter())
    verified = 0
    for _ in range(1000):
        assert request.pace is not None
        request.drafts = 2
        request.pace.pending = Proposed(Source.OWN_TEXT, (0.1, 0.1), (0.02, 0.01))
        pacer.begin([request], prompt_rows=0)
        verified += request.drafts
        rows = 1 + request.drafts
        pacer.observe(StepShape(1, rows, 0, 0, ()), StepTimes(0.5 * rows, 0.0, 0.1 + 0.5 * rows), tokens=1)
    assert 0 < verified <= 2 * 1000 * PROBING_PART * 2


def test_time_for_drafts_that_do_not_pay_is_saved_up_within_bounds() -> None:
    """After a long text without any look-up, those that fail must not be verified step after step."""
    pacer = Pacer(NO_DRAFTER, sizes=(), lookup=9)
    request, verified, steps = FakeRequest(pacer.enter()), 0, 100
    assert request.pace is not None
    for step in range(10_000 + steps):
        request.drafts = 0
        if step >= 10_000:
            request.drafts, request.pace.pending = 2, Proposed(Source.OWN_TEXT, (0.1, 0.1), (0.02, 0.01))
        pacer.begin([request], prompt_rows=0)
        verified += request.drafts
        rows = 1 + request.drafts
        pacer.observe(StepShape(1, rows, 0, 0, ()), StepTimes(0.5 * rows, 0.0, 0.1 + 0.5 * rows), tokens=1)
    # A row takes nearly as long as a step.
    assert 0 < verified <= 3 * (MOST_SAVED + steps * PROBING_PART)


def test_newcomers_are_drafted_for_as_most_requests_are() -> None:
    pacer = chain_pacer()
    assert pacer.newcomers_k == K
    pacer.begin([], prompt_rows=10)
    assert pacer.newcomers_k > 0


def test_a_reset_keeps_what_steps_cost_and_nothing_else() -> None:
    decoding = Decoding(chain_pacer(), 2, row_s=0.3, pass_s=0.5, joint=(0.1, 0.0, 0.0, 0.0))
    decoding.run(100)
    pacer = decoding.pacer
    for _ in range(1000):
        pacer.observe(StepShape(2, 2, 0, 0, ()), StepTimes(1.0, 0.0, 1.1), tokens=2)
    costs = pacer.costs.record()
    pacer.reset()
    assert pacer.costs.record() == costs
    assert pacer.newcomers_k == K
    assert pacer.observed_rate == 0.0
    assert pacer.calibration.conditional(Source.DRAFTER, 0, 0.9) == pytest.approx(0.9)
    # No request is probed with time that was saved up before.
    request = FakeRequest(pacer.enter())
    assert request.pace is not None
    request.pace.outlook.values = [0.0] * len(request.pace.outlook.values)
    pacer.begin([request], prompt_rows=0)
    assert (request.wanted, pacer.counts.probes) == (0, 0)


class PlainSteps:
    """Steps of one request for which nothing is proposed."""

    def __init__(self, pacer: Pacer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pacer, self.request = pacer, FakeRequest(pacer.enter(), k=0)
        self.observed = self.chosen = 0
        observe, choose = pacer.costs.observe, pacer._choose

        def observed(shape: StepShape, times: StepTimes) -> float:
            self.observed += 1
            return observe(shape, times)

        def chosen(*arguments: Any) -> None:
            self.chosen += 1
            choose(*arguments)

        monkeypatch.setattr(pacer.costs, "observe", observed)
        monkeypatch.setattr(pacer, "_choose", chosen)

    def run(self, steps: int) -> tuple[int, int]:
        """Returns how many of them were learnt from, and how often a choice was made."""
        self.observed = self.chosen = 0
        for _ in range(steps):
            self.pacer.begin([self.request], prompt_rows=0)
            self.pacer.observe(StepShape(1, 1, 0, 0, ()), StepTimes(1.0, 0.0, 1.1), tokens=1)
        return self.observed, self.chosen


def test_a_batch_that_is_not_drafted_for_is_learnt_from_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pacer = chain_pacer()
    plain = PlainSteps(pacer, monkeypatch)
    every = CHOOSE_EVERY * CALM_EVERY
    assert plain.run(CALM_AFTER) == (CALM_AFTER, CALM_AFTER // CHOOSE_EVERY)
    plain.run(every)
    assert plain.run(10 * every) == (10 * every // CALM_EVERY, 10)
    # A proposal, and all is as it was at the beginning.
    pace = plain.request.pace
    assert pace is not None
    pacer.proposed(pace, Proposed(Source.OWN_TEXT, (0.9,), (0.9,)))
    assert plain.run(CALM_EVERY)[0] == 1
    pacer.proposed(pace, Proposed(Source.DRAFTER, (0.9,), (0.9,)))
    assert plain.run(CALM_AFTER)[0] == CALM_AFTER
    plain.run(every)
    pacer.reset()
    assert plain.run(CALM_AFTER) == (CALM_AFTER, CALM_AFTER // CHOOSE_EVERY)


@pytest.mark.parametrize("source", Source)
def test_only_what_is_looked_up_is_judged_by_what_all_requests_made_of_it_just_now(source: Source) -> None:
    pacer, expected = chain_pacer(), Calibration()
    pace = pacer.enter()
    for _ in range(5):
        pace.pending = Proposed(source, (0.9,), (0.9,))
        pacer.verified(pace, drafts=1, accepted=0)
        expected.observe(source, 0, 0.9, accepted=False)
        if source in (Source.OWN_TEXT, Source.SHARED_TEXT):
            expected.shift(source, 0.9, accepted=False)
    assert pacer.calibration.conditional(source, 0, 0.9) == expected.conditional(source, 0, 0.9)


def test_heads_are_paid_for_by_rows_of_one_pass() -> None:
    footprint = heads("heads", DrafterShape(taps=(1,)))
    decoding = Decoding(Pacer(footprint, sizes=(1, 2)), 2, row_s=0.001, pass_s=0.01, joint=(0.95, 0.9))
    decoding.run(60)
    assert [request.wanted for request in decoding.requests] == [2, 2]


def test_in_a_large_batch_a_text_that_copies_nothing_is_looked_up_at_every_fourth_step_only() -> None:
    requests = [FakeRequest(RequestPace(Outlook(range(1, K + 1), chain=True))) for _ in range(MANY_REQUESTS)]
    many, few = (chain_pacer().begin(requests[:count], prompt_rows=0) for count in (MANY_REQUESTS, MANY_REQUESTS - 1))
    pace = requests[0].pace
    assert pace is not None
    looks = []
    for _ in range(40):
        looks.append(pace.looks_up(many))
        pace.looked_up(0.0)
    assert all(looks[:QUIET_AFTER])
    assert sum(looks[QUIET_AFTER:]) == (40 - QUIET_AFTER) // 4
    assert all(pace.looks_up(few) for _ in range(8))
    pace.looked_up(0.5)
    assert all(pace.looks_up(many) for _ in range(QUIET_AFTER))


def test_a_probe_that_takes_longer_than_a_step_is_saved_up_for() -> None:
    """Where the drafter's passes are expensive, a probe must still happen now and then."""
    load = next(load for load in CHANGING_LOADS if load.name == "chain, machine gets free")
    run = PacedRun(Tape(load, 2, 1200))
    run.steps()
    assert run.pacer.counts.probes >= 3


def test_knots_that_were_not_observed_lately_keep_their_distance_from_those_that_were() -> None:
    costs = StepCosts()
    for rows in (4, 8, 12, 16):
        for _ in range(20):
            costs.observe(StepShape(rows, rows, 0, 0, ()), StepTimes(0.001 * rows, 0.0, 0.001 * rows + 0.0001))
    before = costs.rows_s(16) - costs.rows_s(8)
    for _ in range(1500):
        costs.observe(StepShape(8, 8, 0, 0, ()), StepTimes(0.004, 0.0, 0.0041))
    after = costs.rows_s(16) - costs.rows_s(8)
    assert 0.3 * before < after < 1.2 * before
    assert costs.rows_s(8) == pytest.approx(0.004, rel=0.1)
