"""Drafts equal those of a dense reference, whatever happened to the request before."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.lossless import tokens_of
from tests.speculative.cases import (
    CASES,
    GREEDY,
    ONE_OF_EACH,
    Case,
    assert_as_reference,
    engine_with,
    plain_texts,
    prompts,
    three_layers,
)

from outrider.api.llm import LLM
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return three_layers()


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> list[list[int]]:
    return plain_texts(target)


def continuations(texts: list[list[int]]) -> list[list[int]]:
    return [text[len(prompt) :] for prompt, text in zip(prompts(), texts, strict=True)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_drafts_equal_the_reference(case: Case, target: LoadedModel, texts: list[list[int]], tmp_path: Path) -> None:
    """Prompts in one piece, drafts accepted in part, then everything again from the prefix cache."""
    engine, recorder = engine_with(case, target, tmp_path, texts, max_num_batched_tokens=256)
    for _ in range(2):
        assert tokens_of(LLM.over(engine).generate(prompts(), GREEDY)) == continuations(texts)
    assert engine.scheduler.kv.hit_tokens > 0
    assert 0 < engine.speculation.accepted_tokens < engine.speculation.draft_tokens
    assert_as_reference(case, target, recorder)


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_chunks_of_prompts_feed_alike(
    case: Case, target: LoadedModel, texts: list[list[int]], tmp_path: Path, chunk: int
) -> None:
    engine, recorder = engine_with(case, target, tmp_path, texts, max_num_batched_tokens=chunk + 8, max_num_seqs=2)
    assert tokens_of(LLM.over(engine).generate(prompts(), GREEDY)) == continuations(texts)
    assert_as_reference(case, target, recorder)


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_preempted_requests_draft_as_if_nothing_had_happened(
    case: Case, target: LoadedModel, texts: list[list[int]], tmp_path: Path
) -> None:
    layers = len(target.spec.layers) * target.spec.kv_size
    drafter = case.load(tmp_path / "size", target, settings=_settings(target))
    slot = layers * 2 * 4 + sum(group.slot_bytes for group in drafter.footprint.groups)
    engine, recorder = engine_with(
        case, target, tmp_path, texts, kv_cache_memory_bytes=150 * slot, max_model_len=100, max_num_batched_tokens=256
    )
    assert tokens_of(LLM.over(engine).generate(prompts(), GREEDY)) == continuations(texts)
    assert engine.scheduler.num_preemptions > 0
    assert_as_reference(case, target, recorder)


def _settings(target: LoadedModel):  # type: ignore[no-untyped-def]
    from tests.speculative.tiny import settings_for

    return settings_for(target)


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_a_request_that_did_not_draft_for_long_drafts_as_if_it_had(
    case: Case, target: LoadedModel, tmp_path: Path
) -> None:
    """Without proposing, the drafter is fed; then others hit what was fed."""
    engine, recorder = engine_with(case, target, tmp_path)
    long = SamplingParams(temperature=0, max_tokens=120)
    engine.add_request("quiet", prompts()[0], long, speculate=False)
    while engine.has_work:
        engine.step()
    assert not recorder.proposals
    text = engine_text(engine, long)
    warm = LLM.over(engine).generate({"prompt_token_ids": text[:-1]}, GREEDY)[0]
    assert warm.metrics.cached_tokens > 100
    assert_as_reference(case, target, recorder)
    cold_engine, cold = engine_with(case, target, tmp_path / "cold", enable_prefix_caching=False)
    again = LLM.over(cold_engine).generate({"prompt_token_ids": text[:-1]}, GREEDY)[0]
    assert again.outputs[0].token_ids == warm.outputs[0].token_ids
    assert [(tokens, drafts) for tokens, _k, drafts in cold.proposals] == [
        (tokens, drafts) for tokens, _k, drafts in recorder.proposals
    ]


def engine_text(engine, params):  # type: ignore[no-untyped-def]
    prompt = prompts()[0]
    engine.add_request("again", prompt, params, speculate=False)
    output = engine.output("again")
    while engine.has_work:
        engine.step()
    return prompt + output.outputs[0].token_ids
