"""A probe finds out what the drafter's proposals are worth, so that these are what is verified."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tests.engine.tiny import tiny_draft_model, tiny_engine, tiny_model

from outrider.api.llm import LLM
from outrider.sampling import SamplingParams
from outrider.scheduler.pacing.pacer import Pace, PacedRequest
from outrider.scheduler.pacing.worth import Source

PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_a_probe_asks_the_drafter_although_something_was_looked_up() -> None:
    model = tiny_model()
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), k=None)
    pacer, lookup = engine.pacer, engine.runner.drafting.lookup
    assert pacer is not None
    assert lookup is not None
    # The next request finds this text.
    (plain,) = LLM.over(engine).generate(PROMPT, GREEDY, speculate=False)
    choose = pacer.begin

    def probe(decoding: Collection[PacedRequest], *, prompt_rows: int) -> Pace:
        pace = choose(decoding, prompt_rows=prompt_rows)
        for request in decoding:
            assert request.pace is not None
            request.wanted, request.pace.probing = request.k, True
        return replace(pace, lookup=8, row_price=0.0, draft_price=5.0, outlook_at=0)

    pacer.begin = probe  # type: ignore[method-assign]
    (output,) = LLM.over(engine).generate(PROMPT, GREEDY)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert lookup.shared_hits > 3
    offered = pacer.counts.offered_by_source
    # What follows the prompt is no probe yet.
    assert offered[Source.SHARED_TEXT] <= 8
    assert offered[Source.DRAFTER] > 20
