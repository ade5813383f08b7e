"""Every family with windows, with every method of drafting: the text is that of the target alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine
from tests.models.fakes import save
from tests.models.fakes import tiny_model as reference_model
from tests.speculative.ahead_cases import ModuleCase, ThirdCase
from tests.speculative.block_cases import BlockCase
from tests.speculative.cases import Case, engine_with
from tests.speculative.recording import Recorder, mostly_right

from outrider.api.llm import LLM
from outrider.errors import ModelError
from outrider.layers.cpu_ops import NumbaOps
from outrider.models.load import LoadedModel, load_model
from outrider.sampling import SamplingParams
from outrider.speculative.drafter import Drafter

FAMILIES = ("mistral", "ministral", "qwen3, windows", "gemma2", "gemma3", "gemma3, one in six", "gpt_oss")
WITH_MODULES = ("mistral", "ministral", "qwen3, windows")
CASES: dict[str, Case] = {
    "eagle3": ThirdCase(layout="original", draft_vocab=50),
    "eagle3, speculators": ThirdCase(layout="speculators", draft_vocab=50, own_embedding=True),
    "dflash": BlockCase(layout="z-lab"),
    "dflash, sliding": BlockCase(layout="z-lab", windows=(6, None), causal=(True, False)),
    "dflash, speculators, sliding": BlockCase(layout="speculators", windows=(6, None), causal=(True, False)),
}
LIMIT, PAGE_TOKENS = 128, 8
SETTINGS: dict[str, Any] = {"max_model_len": LIMIT, "block_size": PAGE_TOKENS, "ops": "numba"}


@cache
def target(family: str) -> LoadedModel:
    with TemporaryDirectory() as directory:
        return load_model(str(save(reference_model(family), Path(directory))), dtype=torch.float32)


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
    """What the target says one request at a time, with no cache and no speculation."""
    llm = LLM.over(tiny_engine(target(family), enable_prefix_caching=False, **SETTINGS))
    return [tokens_of(llm.generate([prompt], wanted))[0] for prompt, wanted in zip(*workload(), strict=True)]


def texts(family: str) -> list[list[int]]:
    return [prompt + said for prompt, said in zip(workload()[0], plain(family), strict=True)]


def assert_lossless(engine: Any, family: str) -> None:
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(*workload())) == plain(family)
    assert engine.speculation.accepted_tokens > 0
    # Again, now that everything is cached.
    assert tokens_of(llm.generate(*workload())) == plain(family)
    assert engine.scheduler.kv.hit_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_drafters_that_read_taps(family: str, case: Case, tmp_path: Path) -> None:
    engine, _ = engine_with(
        case, target(family), tmp_path, texts(family), max_len=LIMIT, drafter_ops=NumbaOps(1), **SETTINGS
    )
    assert_lossless(engine, family)


@pytest.mark.parametrize("family", WITH_MODULES)
@pytest.mark.parametrize("layout", ["qwen", "deepseek"])
def test_modules_of_the_target(family: str, layout: str, tmp_path: Path) -> None:
    engine, _ = engine_with(
        ModuleCase(layout=layout), target(family), tmp_path, texts(family), max_len=LIMIT, **SETTINGS
    )
    assert_lossless(engine, family)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_modules_that_nobody_knows_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"not known for {family} models"):
        engine_with(ModuleCase(layout="qwen"), target(family), tmp_path, max_len=LIMIT, **SETTINGS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model(family: str) -> None:
    """The target itself, cut short: windows on both sides, in groups of their own."""
    model = target(family)
    inner: Drafter = tiny_draft_model(model, first_layers(model, 2), block_size=PAGE_TOKENS, max_len=LIMIT)
    drafter = Recorder(inner, mostly_right(texts(family)))
    engine = tiny_engine(model, drafter=drafter, method="draft_model", **SETTINGS)
    assert_lossless(engine, family)
    assert engine.speculation.accepted_tokens < engine.speculation.draft_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_that_drafts_for_itself_agrees_always(family: str) -> None:
    model = target(family)
    drafter = tiny_draft_model(model, model, block_size=PAGE_TOKENS, max_len=LIMIT)
    engine = tiny_engine(model, drafter=drafter, method="draft_model", **SETTINGS)
    assert_lossless(engine, family)
    assert engine.speculation.accepted_tokens == engine.speculation.draft_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_look_up(family: str) -> None:
    engine = tiny_engine(target(family), speculate=True, **SETTINGS)
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(*workload())) == plain(family)
    assert engine.speculation.draft_tokens > 0


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("case", ["dflash, sliding", "eagle3"])
@pytest.mark.parametrize("chunk", [5, 24])
def test_chunks_of_any_size(family: str, case: str, chunk: int, tmp_path: Path) -> None:
    engine, _ = engine_with(
        CASES[case],
        target(family),
        tmp_path,
        texts(family),
        max_len=LIMIT,
        max_num_batched_tokens=chunk + 3,
        max_num_seqs=2,
        **SETTINGS,
    )
    assert tokens_of(LLM.over(engine).generate(*workload())) == plain(family)
    assert engine.speculation.draft_tokens > 0
