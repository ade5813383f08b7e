"""What a pacer says about its choices."""

from __future__ import annotations

import pytest

from outrider.kv.archetypes import DrafterShape, lookup
from outrider.scheduler.pacing.costs import StepShape, StepTimes
from outrider.scheduler.pacing.figures import SOURCES
from outrider.scheduler.pacing.pacer import Pacer
from outrider.scheduler.pacing.worth import Proposed, Source


def by_source(counts: list[int]) -> dict[str, int]:
    return {name: count for name, count in zip(SOURCES, counts, strict=True) if count}


def test_drafts_are_counted_by_where_they_came_from() -> None:
    pacer = Pacer(lookup("any", DrafterShape()), sizes=(), lookup=4)
    one, other = pacer.enter(), pacer.enter()
    pacer.proposed(one, Proposed(Source.OWN_TEXT, (0.5, 0.5, 0.5), (0.5, 0.25, 0.125)))
    pacer.proposed(other, Proposed(Source.GRAMMAR, (0.999,), (0.999,)))
    pacer.verified(one, drafts=2, accepted=1)
    pacer.verified(other, drafts=1, accepted=1)
    # Nothing waits for verification any more, so there is nothing to count.
    pacer.verified(one, drafts=2, accepted=2)
    assert by_source(pacer.counts.offered_by_source) == {"own_text": 3, "grammar": 1}
    assert by_source(pacer.counts.verified_by_source) == {"own_text": 2, "grammar": 1}
    assert by_source(pacer.counts.accepted_by_source) == {"own_text": 1, "grammar": 1}
    pacer.reset()
    assert by_source(pacer.counts.offered_by_source) == {}


def test_steps_and_their_rate_are_told() -> None:
    pacer = Pacer(lookup("any", DrafterShape()), sizes=(), lookup=4)
    assert pacer.describe().observed_rate == 0.0
    times = StepTimes(target_s=0.008, draft_s=0.0, total_s=0.01)
    for rows, tokens in ((1, 1), (3, 3)):
        pacer.begin([], prompt_rows=0)
        pacer.observe(StepShape(requests=1, rows=rows, keys=8, fed=0, passes=()), times, tokens=tokens)
    told = pacer.describe()
    assert (pacer.counts.plain_steps, pacer.counts.drafting_steps) == (1, 1)
    assert 100.0 < told.observed_rate < 300.0
    assert told.plain_rate == told.rate > 0
    assert (told.drafting_requests, told.drafts) == (0, 0)
    assert told.row_price > 0
    # The first step sets the speed of the machine, and the second one is the first to teach a curve.
    assert pacer.costs.seconds()["target"] == [(3, pytest.approx(pacer.costs.target.at(3) * told.speed))]
