"""A difference counts as a tie only where the logits say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.engine.tiny import tiny_engine, tiny_model

from outrider.engine.engine import Engine
from outrider.engine.ties import examine, first_difference, tie_tolerance
from outrider.models.load import LoadedModel
from outrider.models.parameters import Linear
from outrider.sampling import SamplingParams

BEFORE = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SEEDED = replace(GREEDY, temperature=0.8, seed=3)


def best_after(engine: Engine, params: SamplingParams) -> int:
    engine.add_request("best", BEFORE, replace(params, max_tokens=1))
    output = engine.output("best")
    while not output.finished:
        engine.step()
    return output.outputs[0].token_ids[0]


def with_twin(model: LoadedModel, token: int, twin: int, apart: float = 0.0) -> LoadedModel:
    """`twin` gets the logit of `token`, scaled by 1 - apart."""
    weight = model.parameters.head.weight.clone()
    weight[twin] = weight[token] * (1 - apart)
    return replace(model, parameters=replace(model.parameters, head=Linear(weight=weight)))


def test_equal_logits_are_a_tie_and_others_are_not() -> None:
    best = best_after(tiny_engine(), GREEDY)
    twin = (best + 1) % 256
    tied = examine(tiny_engine(with_twin(tiny_model(), best, twin)), BEFORE, (best, twin), GREEDY)
    assert tied.tied
    assert tied.gap < 1e-5
    apart = examine(tiny_engine(with_twin(tiny_model(), best, twin, apart=0.05)), BEFORE, (best, twin), GREEDY)
    assert not apart.tied
    assert apart.best == best


def test_two_equal_candidates_that_are_not_the_best_are_no_tie() -> None:
    best = best_after(tiny_engine(), GREEDY)
    low, twin = (best + 1) % 256, (best + 2) % 256
    model = with_twin(tiny_model(), low, twin)
    assert not examine(tiny_engine(model), BEFORE, (low, twin), GREEDY).tied


def test_sampled_candidates_are_compared_with_their_noise() -> None:
    engine = tiny_engine()
    drawn = best_after(engine, SEEDED)
    same = examine(engine, BEFORE, (drawn, drawn), SEEDED)
    assert same.best == drawn
    assert same.gap == 0
    for other in range(0, 256, 16):
        if other != drawn:
            parting = examine(engine, BEFORE, (drawn, other), SEEDED)
            assert parting.best == drawn
            assert parting.gap > 0


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_first_difference(one: list[int], other: list[int], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_short_formats_get_more_room() -> None:
    assert tie_tolerance(torch.float32) == 1e-3
    assert tie_tolerance(torch.float32) < tie_tolerance(torch.float16) < tie_tolerance(torch.bfloat16) <= 0.25
