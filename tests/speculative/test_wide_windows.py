"""Windows of 33 and 64 tokens, prompts far longer: the text is Transformers', with every method of drafting."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests.engine.lossless import assert_greedy_by_reference, tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine
from tests.models.fakes import save
from tests.models.fakes import tiny_model as reference_model
from tests.speculative.ahead_cases import ModuleCase
from tests.speculative.cases import Case, engine_with
from tests.speculative.recording import Recorder, mostly_right
from tests.speculative.test_windows import CASES, FAMILIES, WITH_MODULES

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.layers.cpu_ops import NumbaOps
from outrider.models.load import LoadedModel, load_model
from outrider.sampling import SamplingParams

LIMIT, PAGE_TOKENS = 384, 8
SETTINGS: dict[str, Any] = {"max_model_len": LIMIT, "block_size": PAGE_TOKENS, "ops": "numba"}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(60) for _ in range(length)] for length in (70, 321)]


@cache
def reference(family: str, window: int) -> Any:
    return reference_model(family, sliding_window=window, max_position_embeddings=LIMIT)


@cache
def target(family: str, window: int) -> LoadedModel:
    with TemporaryDirectory() as directory:
        return load_model(str(save(reference(family, window), Path(directory))), dtype=torch.float32)


@cache
def plain(family: str, window: int) -> list[list[int]]:
    return tokens_of(LLM.over(tiny_engine(target(family, window), **SETTINGS)).generate(prompts(), GREEDY))


@pytest.mark.parametrize("window", [33, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_references(family: str, window: int) -> None:
    assert {layer.window for layer in target(family, window).spec.layers} - {None} == {window}
    for prompt, said in zip(prompts(), plain(family, window), strict=True):
        assert len(said) == 24
        assert_greedy_by_reference(reference(family, window), prompt, said)


def tapping(case: Case) -> Callable[[str, int, Path], Engine]:
    def make(family: str, window: int, directory: Path) -> Engine:
        texts = [prompt + said for prompt, said in zip(prompts(), plain(family, window), strict=True)]
        engine, _ = engine_with(
            case, target(family, window), directory, texts, max_len=LIMIT, drafter_ops=NumbaOps(1), **SETTINGS
        )
        return engine

    return make


def draft_model(family: str, window: int, directory: Path) -> Engine:
    model = target(family, window)
    texts = [prompt + said for prompt, said in zip(prompts(), plain(family, window), strict=True)]
    inner = tiny_draft_model(model, first_layers(model, 2), block_size=PAGE_TOKENS, max_len=LIMIT)
    return tiny_engine(model, drafter=Recorder(inner, mostly_right(texts)), method="draft_model", **SETTINGS)


def look_up(family: str, window: int, directory: Path) -> Engine:
    return tiny_engine(target(family, window), speculate=True, **SETTINGS)


DRAFTERS: dict[str, Callable[[str, int, Path], Engine]] = {
    "look-up": look_up,
    "draft model": draft_model,
    "eagle3": tapping(CASES["eagle3"]),
    "dflash, sliding": tapping(CASES["dflash, sliding"]),
    "mtp": tapping(ModuleCase(layout="qwen")),
}
ALL = [(drafter, family) for drafter in DRAFTERS for family in (WITH_MODULES if drafter == "mtp" else FAMILIES)]


@pytest.mark.parametrize(("drafter", "family"), ALL)
def test_no_drafter_changes_it(drafter: str, family: str, tmp_path: Path) -> None:
    engine = DRAFTERS[drafter](family, 64, tmp_path)
    assert engine.sanitizer is not None
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == plain(family, 64)
    assert engine.speculation.draft_tokens > 0
    # And from the cache.
    assert tokens_of(llm.generate(prompts()[-1:], GREEDY)) == plain(family, 64)[-1:]
    assert engine.scheduler.kv.hit_tokens > 0
