"""Drafts are verified only as far as they are likely: fewer rows, the same text."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.engine.tiny import tiny_draft_model, tiny_engine, tiny_model, tiny_spec
from tests.speculative.cases import GREEDY, ONE_OF_EACH, prompts, three_layers
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.load import LoadedModel
from outrider.runner.request import RunningRequest
from outrider.runner.sampler import RequestSampling
from outrider.sampling import SamplingParams
from outrider.scheduler import Request
from outrider.speculative.drafter import Drafter, FeedRow, ProposeRow

K = 5


class Watched:
    """Counts the drafts that were asked for, made and verified."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self.made: list[int] = []
        self.asked: list[int] = []
        """The k of the first steps of each request, which are far from its end."""
        step = drafter.step

        def counted(feeds: list[FeedRow], taps: torch.Tensor, rows: list[ProposeRow]) -> list[list[int]]:
            drafts = step(feeds, taps, rows)
            self.asked.extend(row.k for row in rows if len(row.request.tokens) - row.request.record.prompt_len < 10)
            self.made.extend(map(len, drafts))
            return drafts

        drafter.step = counted  # type: ignore[method-assign, assignment]
        self.engine = engine

    @property
    def verified(self) -> int:
        return self.engine.speculation.draft_tokens


def engine_over(drafter: Drafter, target: LoadedModel, method: str, **speculation: Any) -> Engine:
    config = EngineConfig(
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=8,
        kv_cache_memory_bytes=1 << 23,
        sanitizer="raise",
        sanitizer_level="bytes",
        backend="reference",
        device="cpu",
        speculative_config=SpeculativeConfig(method=method, **speculation),
    )
    return build_engine(config, model=target, drafter=drafter)


def run(drafter: Drafter, target: LoadedModel, method: str, params: SamplingParams, confidence: float) -> Watched:
    watched = Watched(
        engine_over(drafter, target, method, num_speculative_tokens=K, draft_confidence=confidence), drafter
    )
    llm = LLM.over(watched.engine)
    found = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts()]
    plain = LLM.over(tiny_engine(target, enable_prefix_caching=False))
    assert found == [plain.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts()]
    return watched


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=24)], ids=["0", "0.9"])
def test_fewer_drafts_are_verified_and_the_text_stays(name: str, params: SamplingParams, tmp_path: Path) -> None:
    target, case = three_layers(), ONE_OF_EACH[name]
    case.save(tmp_path, target)

    def drafter() -> Drafter:
        return case.load(tmp_path, target, settings_for(target, page_tokens=8))

    runs = [run(drafter(), target, case.method, params, confidence) for confidence in (0.0, 0.001, 0.03, 0.3, 0.99)]
    verified = [each.verified for each in runs]
    assert verified == sorted(verified, reverse=True)
    assert len(set(verified)) > 2
    # A chain ends with the first draft that is too unlikely; a block asks for fewer the next time.
    made = [sum(each.made) / len(each.made) for each in runs]
    assert made[-1] < made[0] - 1
    assert (min(runs[-1].asked) == K) == (drafter().footprint.passes(K) > 1)


def test_a_draft_model_stops_where_it_is_unsure() -> None:
    target = three_layers()
    draft = tiny_model(tiny_spec(windows=(None,)), seed=5)
    everything = run(tiny_draft_model(target, draft, block_size=8), target, "draft_model", GREEDY, 0.0)
    some = run(tiny_draft_model(target, draft, block_size=8), target, "draft_model", GREEDY, 0.05)
    assert 0 < some.verified < everything.verified
    assert sum(some.made) < sum(everything.made)


def request() -> RunningRequest:
    record = SimpleNamespace(id="a", tokens=array("I", [1]), spec=SimpleNamespace(salt=""))
    sampling = RequestSampling(SamplingParams(temperature=0), vocab_size=256, device="cpu")
    return RunningRequest(cast(Request, record), sampling)


@pytest.mark.parametrize(
    ("probabilities", "least", "verified"),
    [
        ((0.9, 0.5, 0.5, 0.9), 0.3, 2),
        ((0.9, 0.5, 0.5, 0.9), 0.0, 4),
        # What is not a number is not likely, nor is anything behind it.
        ((0.9, float("nan"), 1.0), 0.001, 1),
    ],
)
@pytest.mark.parametrize("own", [False, True], ids=["from logits", "its own"])
def test_drafts_are_verified_while_their_joint_probability_is_high_enough(
    probabilities: tuple[float, ...], least: float, verified: int, own: bool
) -> None:
    drafting, drafts = request(), [*range(len(probabilities))]
    for probability in probabilities:
        # A drafter's own estimate counts instead of that of its logits.
        estimate = 0.8 if own else probability
        drafting.drafted(estimate, estimate)
    drafting.propose(drafts, least, probabilities if own else None)
    assert drafting.drafts == drafts[:verified]
    drafting.begin_drafting()
    assert (drafting.drafts, drafting.confidence) == ([], 1.0)


def test_drafts_that_are_looked_up_have_no_probability_and_are_all_verified() -> None:
    drafting = request()
    drafting.propose([5, 6], 0.9)
    assert drafting.drafts == [5, 6]


def test_a_block_asks_for_as_many_drafts_as_were_likely_in_the_step_before() -> None:
    drafting, asked = request(), []
    for likely in (7, 2, 0, 1, 3, 7, 5, 4):
        asked.append(drafting.worth_asking(7))
        drafting.begin_drafting()
        for number in range(asked[-1]):
            probability = 1.0 if number < likely else 0.1
            drafting.drafted(probability, probability)
        drafting.propose([3] * asked[-1], 0.5)
        assert len(drafting.drafts) == min(likely, asked[-1])
    # One more than were likely; where all were, twice as many.
    assert asked == [7, 7, 3, 1, 3, 7, 7, 6]
    assert drafting.worth_asking(2) == 2
    drafting.begin_drafting()
    # With a threshold of 0 nothing is learnt from unlikely drafts.
    drafting.drafted(0.1, 0.1)
    drafting.propose([3], 0.0)
    assert drafting.worth_asking(7) == 5


def test_without_a_number_the_drafter_makes_as_many_drafts_as_it_was_trained_for(tmp_path: Path) -> None:
    target, case = three_layers(), ONE_OF_EACH["full"]
    case.save(tmp_path, target)
    drafter = case.load(tmp_path, target, settings_for(target, page_tokens=8))
    by_itself = engine_over(drafter, target, case.method)
    assert by_itself.k == drafter.default_k == drafter.footprint.block_sizes[-1] - 1
    assert by_itself.pacer is not None
    assert by_itself.pacer.sizes == (by_itself.k,)
    told = engine_over(drafter, target, case.method, num_speculative_tokens=2)
    assert (told.k, told.runner.drafting.least_confidence, told.pacer) == (2, 0.0, None)
    both = engine_over(drafter, target, case.method, draft_confidence=0.5)
    assert (both.k, both.runner.drafting.least_confidence, both.pacer) == (drafter.default_k, 0.5, None)


@pytest.mark.parametrize("wrong", [-0.1, 1.0, 2, float("nan"), True, "0.5"])
def test_a_confidence_outside_its_range_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft_confidence must lie in \[0, 1\)"):
        SpeculativeConfig(method="dflash", draft_confidence=wrong)
