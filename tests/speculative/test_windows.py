"""Every family with windows, with every way of drafting: the text is that of the target alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from tests.engine.lossless import assert_greedy_by_reference, tokens_of
from tests.engine.tiny import tiny_draft_model, tiny_engine
from tests.speculative.windows import (
    EVERY_DRAFTER,
    FAMILIES,
    LOOK_UP,
    PAGE_TOKENS,
    SETTINGS,
    alone,
    engine_for,
    pairs,
    reference,
    target,
)

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.errors import ModelError
from outrider.sampling import SamplingParams

LIMIT, WIDE_LIMIT = 128, 384
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Up to ten windows long, some with a common beginning; greedy and sampled in turns."""
    rng = random.Random(2)
    shared = [rng.randrange(60) for _ in range(48)]
    prompts = [[rng.randrange(60) for _ in range(length)] for length in (1, 20, 80)]
    prompts += [shared + [rng.randrange(60) for _ in range(length)] for length in (3, 30)]
    params = [
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=36, ignore_eos=True)
        for number in range(len(prompts))
    ]
    return prompts, params


@cache
def plain(family: str) -> list[list[int]]:
    return alone(target(family), *workload(), limit=LIMIT)


def texts(family: str) -> list[list[int]]:
    return [prompt + said for prompt, said in zip(workload()[0], plain(family), strict=True)]


def assert_lossless(engine: Engine, family: str) -> None:
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(*workload())) == plain(family)
    # Again, now that everything is cached.
    assert tokens_of(llm.generate(*workload())) == plain(family)
    assert engine.scheduler.kv.hit_tokens > 0
    assert engine.speculation.draft_tokens > 0


@pytest.mark.parametrize(("drafter", "family"), pairs(EVERY_DRAFTER))
def test_no_drafter_changes_the_text(drafter: str, family: str, tmp_path: Path) -> None:
    engine = engine_for(drafter, target(family), texts(family), tmp_path, limit=LIMIT)
    assert_lossless(engine, family)
    if drafter != LOOK_UP:
        assert 0 < engine.speculation.accepted_tokens < engine.speculation.draft_tokens


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_modules_of_families_without_a_layout_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{family} models such as .* are not supported"):
        engine_for("mtp", target(family), [], tmp_path, limit=LIMIT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_that_drafts_for_itself_agrees_always(family: str) -> None:
    model = target(family)
    drafter = tiny_draft_model(model, model, block_size=PAGE_TOKENS, max_len=LIMIT)
    engine = tiny_engine(model, drafter=drafter, method="draft_model", max_model_len=LIMIT, **SETTINGS)
    assert_lossless(engine, family)
    assert engine.speculation.accepted_tokens == engine.speculation.draft_tokens


# ---- windows of 33 and 64 tokens, and prompts that are far longer --------------------------------------


def wide(window: int) -> dict[str, int]:
    return {"sliding_window": window, "max_position_embeddings": WIDE_LIMIT}


def long_prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(60) for _ in range(length)] for length in (70, 321)]


@cache
def said_plainly(family: str, window: int) -> list[list[int]]:
    engine = tiny_engine(target(family, **wide(window)), max_model_len=WIDE_LIMIT, **SETTINGS)
    return tokens_of(LLM.over(engine).generate(long_prompts(), GREEDY))


@pytest.mark.parametrize("window", [33, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_transformers(family: str, window: int) -> None:
    assert {layer.window for layer in target(family, **wide(window)).spec.layers} - {None} == {window}
    for prompt, said in zip(long_prompts(), said_plainly(family, window), strict=True):
        assert len(said) == 24
        assert_greedy_by_reference(reference(family, **wide(window)), prompt, said)
