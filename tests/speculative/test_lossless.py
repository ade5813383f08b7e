"""Speculation on = off, token for token, with every method that reads the target's taps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.test_lossless import WINDOWS, workload
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec
from tests.speculative.cases import ONE_OF_EACH, Case, engine_with, three_layers

from outrider.api.llm import LLM
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams

Plain = tuple[LoadedModel, list[list[int]]]


@pytest.fixture(scope="module", params=["full", "mixed"])
def plain(request: pytest.FixtureRequest) -> Plain:
    """A model, and what it says one request at a time, with no cache and no speculation."""
    windows = WINDOWS[request.param]
    model = tiny_model(tiny_spec(windows=(*windows, windows[0])))
    llm = LLM.over(tiny_engine(model, enable_prefix_caching=False))
    return model, [tokens_of(llm.generate([prompt], wanted))[0] for prompt, wanted in zip(*workload(), strict=True)]


def texts(expected: list[list[int]]) -> list[list[int]]:
    return [prompt + said for prompt, said in zip(workload()[0], expected, strict=True)]


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
@pytest.mark.parametrize("block_size", [1, 16])
def test_drafts_never_change_the_text(plain: Plain, case: Case, block_size: int, tmp_path: Path) -> None:
    model, expected = plain
    engine, _ = engine_with(case, model, tmp_path, texts(expected), block_size=block_size)
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(*workload())) == expected
    assert 0 < engine.speculation.accepted_tokens < engine.speculation.draft_tokens
    # Again, now that everything is cached.
    assert tokens_of(llm.generate(*workload())) == expected
    assert engine.scheduler.kv.hit_tokens > 0


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_shortage_gives_the_same_text(plain: Plain, case: Case, tmp_path: Path) -> None:
    """Draft pages are given up first, then requests are preempted; the text of both is the same."""
    model, expected = plain
    target_bytes = len(model.spec.layers) * 2 * model.spec.kv_size * 4
    drafter_bytes = 2 * 2 * 32 * 4  # two layers of two heads of 16 at most
    engine, _ = engine_with(
        case,
        model,
        tmp_path,
        texts(expected),
        kv_cache_memory_bytes=180 * (target_bytes + drafter_bytes),
        max_model_len=128,
    )
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected
    if model.spec.layers[0].window is None:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_several_continuations_are_those_of_the_plain_target(case: Case, tmp_path: Path) -> None:
    model = three_layers()
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=20)
    prompts = [[5, 6, 7] * 11, [9] * 16]
    expected = tokens_of(LLM.over(tiny_engine(model)).generate(prompts, params))
    engine, _ = engine_with(case, model, tmp_path)
    assert tokens_of(LLM.over(engine).generate(prompts, params)) == expected
    assert engine.speculation.draft_tokens > 0
