"""Drafts equal those of a dense reference, whatever happened to the request before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
from outrider.backends.registry import select_backend
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
    engine, recorder = engine_with(case, target, tmp_path, texts, max_num_batched_tokens=256)
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, GREEDY)
    outputs = [engine.output(str(number)) for number in range(len(prompts()))]
    roster, step = engine.scheduler.roster, 0
    while engine.has_work:
        engine.step()
        step += 1
        victim = roster.last_running()
        if victim is not None and step in (2, 5, 6, 9):
            roster.preempt(victim)
    assert roster.num_preemptions == 4
    assert tokens_of(outputs) == continuations(texts)
    assert_as_reference(case, target, recorder)


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_a_request_that_did_not_draft_for_long_drafts_as_if_it_had(
    case: Case, target: LoadedModel, tmp_path: Path
) -> None:
    """Cold = warm: a drafter that is only fed leaves behind what a later request needs, slot for slot."""
    quiet = SamplingParams(temperature=0, max_tokens=120)
    engine, warm = engine_with(case, target, tmp_path)
    engine.add_request("quiet", prompts()[0], quiet, speculate=False)
    output = engine.output("quiet")
    while engine.has_work:
        engine.step()
    assert not warm.proposals
    text = {"prompt_token_ids": prompts()[0] + output.outputs[0].token_ids}
    again = LLM.over(engine).generate(text, GREEDY)[0]
    assert again.metrics.cached_tokens > 100
    assert_as_reference(case, target, warm)
    cold_engine, cold = engine_with(case, target, tmp_path / "cold", enable_prefix_caching=False)
    assert tokens_of(LLM.over(cold_engine).generate(text, GREEDY)) == tokens_of([again])
    assert cold.proposals == warm.proposals


@pytest.mark.parametrize("k", [1, 2, 6, 11])
@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_any_number_of_drafts(case: Case, target: LoadedModel, texts: list[list[int]], tmp_path: Path, k: int) -> None:
    """Block sizes other than the trained one among them."""
    engine, recorder = engine_with(case, target, tmp_path, texts, k=k, max_num_batched_tokens=256)
    assert tokens_of(LLM.over(engine).generate(prompts(), GREEDY)) == continuations(texts)
    assert max(proposal.k for proposal in recorder.proposals) == k
    assert_as_reference(case, target, recorder)


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_compiled_operations_draft_alike(
    case: Case, target: LoadedModel, texts: list[list[int]], tmp_path: Path
) -> None:
    backend = select_backend("auto", device=torch.device("cpu"), threads=1)
    if backend.name == "reference":
        pytest.skip("no compiled operations here")
    engine, recorder = engine_with(case, target, tmp_path, texts, drafter_backend=backend, backend="cpu", num_threads=1)
    assert tokens_of(LLM.over(engine).generate(prompts(), GREEDY)) == continuations(texts)
    assert_as_reference(case, target, recorder)
