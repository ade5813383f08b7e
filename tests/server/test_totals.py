"""What an answer says of its own times and counts."""

from __future__ import annotations

from outrider.engine.speculation import SpeculationCounts
from outrider.sampling import SamplingParams
from outrider.server.front.totals import Totals
from outrider.server.messages import Delta, Ending, Submit


def ended(name: str, *, scheduled_s: float, first_token_s: float, finished_s: float, cached_tokens: int) -> Delta:
    ending = Ending(
        arrival_s=100.0,
        scheduled_s=scheduled_s,
        first_token_s=first_token_s,
        finished_s=finished_s,
        prompt_tokens=8,
        generated_tokens=3,
        cached_tokens=cached_tokens,
        steps=5,
        speculation=SpeculationCounts(drafts=2, draft_tokens=6, accepted_tokens=3, accepted_at=[2, 1, 0]),
    )
    return Delta(request_id=name, index=0, text="", token_ids=[1, 2, 3], pieces=[""] * 3, origins="ppp", ending=ending)


def test_times_are_from_arrival_and_those_of_whoever_came_first() -> None:
    totals = Totals(
        [
            Submit(request_id=name, prompt_token_ids=[1] * 8, params=SamplingParams(), arrival_s=100.0)
            for name in ("a", "b")
        ]
    )
    totals.take(ended("a", scheduled_s=103.0, first_token_s=104.0, finished_s=110.0, cached_tokens=4))
    assert not totals.complete
    totals.take(ended("b", scheduled_s=102.0, first_token_s=105.0, finished_s=109.0, cached_tokens=2))
    assert totals.complete
    metrics = totals.metrics()
    speculation = metrics.pop("speculative_decoding")
    assert metrics == {"time_in_queue_s": 2.0, "time_to_first_token_s": 4.0, "engine_time_s": 10.0, "steps": 10}
    assert speculation == {
        "drafts": 4,
        "draft_tokens": 12,
        "accepted_tokens": 6,
        "acceptance_length": 2.5,
        "acceptance_rate": 0.5,
        "accepted_per_position": [4, 2, 0],
    }
    assert totals.usage() == {
        "prompt_tokens": 16,
        "completion_tokens": 6,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
