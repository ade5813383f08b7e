"""A drafter never changes what the target finds in the prefix cache, and pays for its own reach only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import ONE_OF_EACH, Case, engine_with, three_layers

from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams
from outrider.scheduler.plan import ScheduledRequest, StepPlan

FEW = SamplingParams(temperature=0, max_tokens=6)


def shared_prefixes() -> list[list[int]]:
    rng = random.Random(4)
    base = [rng.randrange(256) for _ in range(70)]
    return [
        base[:n] + [rng.randrange(256) for _ in range(more)] for n, more in ((70, 0), (64, 5), (33, 9), (70, 3))
    ] + [
        base,
        base[:40],
        base[:16],
    ]


def one_by_one(engine: Engine) -> tuple[list[int], list[ScheduledRequest]]:
    """The hit of each request, and all rows of all steps."""
    rows: list[ScheduledRequest] = []
    run = engine.runner.run

    def watched(plan: StepPlan):  # type: ignore[no-untyped-def]
        rows.extend(plan.scheduled)
        return run(plan)

    engine.runner.run = watched  # type: ignore[method-assign]
    hits = []
    for number, prompt in enumerate(shared_prefixes()):
        engine.add_request(str(number), prompt, FEW)
        output = engine.output(str(number))
        while engine.has_work:
            engine.step()
        hits.append(output.metrics.cached_tokens)
    return hits, rows


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_hits_with_a_drafter_are_those_without(case: Case, tmp_path: Path, block_size: int) -> None:
    model = three_layers()
    expected, _ = one_by_one(tiny_engine(model, block_size=block_size))
    engine, recorder = engine_with(case, model, tmp_path, block_size=block_size)
    hits, rows = one_by_one(engine)
    assert hits == expected
    assert sum(hit > 0 for hit in hits) >= 5
    reach = recorder.footprint.token_reach
    taps = [row.tap_rows for row in rows if row.tap_rows]
    # One row for each hit of a drafter that reaches ahead, none for the others; and never a page.
    assert set(taps) <= {reach}
    assert len(taps) <= sum(hit > 0 for hit in hits)
    assert bool(taps) == (reach > 0)


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_drafts_after_a_hit_are_those_of_a_cold_cache(case: Case, tmp_path: Path) -> None:
    model = three_layers()
    warm_engine, warm = engine_with(case, model, tmp_path / "warm")
    cold_engine, cold = engine_with(case, model, tmp_path / "cold", enable_prefix_caching=False)
    hits, _ = one_by_one(warm_engine)
    one_by_one(cold_engine)
    assert sum(hits) > 0
    assert warm.proposals == cold.proposals
