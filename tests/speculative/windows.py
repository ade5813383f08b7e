"""Targets of every family with windows, and an engine over them for every way of drafting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from outrider.backends.cpu.backend import CPUBackend
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel, load_model
from outrider.sampling import SamplingParams

WITH_MODULES = ("mistral", "ministral", "qwen3, windows")
FAMILIES = (*WITH_MODULES, "gemma2", "gemma3", "gemma3, one in six", "gpt_oss")
CASES: dict[str, Case] = {
    "eagle3": ThirdCase(layout="original", draft_vocab=50),
    "eagle3, speculators": ThirdCase(layout="speculators", draft_vocab=50, own_embedding=True),
    "dflash": BlockCase(layout="z-lab"),
    "dflash, sliding": BlockCase(layout="z-lab", windows=(6, None), causal=(True, False)),
    "dflash, speculators, sliding": BlockCase(layout="speculators", windows=(6, None), causal=(True, False)),
    "mtp": ModuleCase(layout="qwen"),
    "mtp, deepseek": ModuleCase(layout="deepseek"),
}
LOOK_UP, DRAFT_MODEL = "look-up", "draft model"
EVERY_DRAFTER = (LOOK_UP, DRAFT_MODEL, *CASES)
ONE_OF_EACH = (LOOK_UP, DRAFT_MODEL, "eagle3", "dflash, sliding", "mtp")
PAGE_TOKENS = 8
SETTINGS: dict[str, Any] = {"block_size": PAGE_TOKENS, "backend": "cpu"}

Prompts = Sequence[list[int]]


def pairs(drafters: Iterable[str], families: Sequence[str] = FAMILIES) -> list[tuple[str, str]]:
    """Drafters with the families of target that they can draft for."""
    return [
        (drafter, family)
        for drafter in drafters
        for family in families
        if family in WITH_MODULES or not isinstance(CASES.get(drafter), ModuleCase)
    ]


@cache
def reference(family: str, **fields: int) -> Any:
    return reference_model(family, **fields)


@cache
def target(family: str, **fields: int) -> LoadedModel:
    with TemporaryDirectory() as directory:
        return load_model(str(save(reference(family, **fields), Path(directory))), dtype=torch.float32)


def alone(model: LoadedModel, prompts: Prompts, params: Sequence[SamplingParams], *, limit: int) -> list[list[int]]:
    """What the target says one request at a time, with no cache and no speculation."""
    llm = LLM.over(tiny_engine(model, max_model_len=limit, enable_prefix_caching=False, **SETTINGS))
    return [tokens_of(llm.generate([prompt], wanted))[0] for prompt, wanted in zip(prompts, params, strict=True)]


def engine_for(
    drafter: str, model: LoadedModel, texts: Prompts, directory: Path, *, limit: int, **settings: Any
) -> Engine:
    """An engine with the sanitizer on, whose drafts continue `texts` and are wrong from some place on."""
    settings = SETTINGS | {"max_model_len": limit} | settings
    if drafter == LOOK_UP:
        return tiny_engine(model, speculate=True, **settings)
    if drafter == DRAFT_MODEL:
        inner = tiny_draft_model(model, first_layers(model, 2), block_size=PAGE_TOKENS, max_len=limit)
        recorder = Recorder(inner, mostly_right(texts))
        engine = tiny_engine(model, drafter=recorder, method="draft_model", **settings)
    else:
        engine, recorder = engine_with(
            CASES[drafter], model, directory, texts, max_len=limit, drafter_backend=CPUBackend(1), **settings
        )
    recorder.cut = "draft_confidence" in settings
    assert engine.sanitizer is not None
    return engine
