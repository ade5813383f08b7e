"""Windows with everything at once: too little memory, small chunks, hits, drafts cut short; the text stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine
from tests.speculative.ahead_cases import ModuleCase
from tests.speculative.cases import Case, engine_with
from tests.speculative.recording import Recorder, mostly_right
from tests.speculative.test_windows import CASES, LIMIT, PAGE_TOKENS, SETTINGS, target

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.engine.memory import least_pages, total_bytes
from outrider.layers.cpu_ops import NumbaOps
from outrider.sampling import SamplingParams

WITH_MODULES = ("mistral", "ministral")
FAMILIES = (*WITH_MODULES, "gemma3, one in six", "gpt_oss")
CHUNK_TOKENS = 16
K = 4
LIKELY = {"draft model": 0.004, "eagle3": 0.03, "dflash, sliding": 0.004, "mtp": 0.004}
"""Random drafters are not sure of much: some drafts together are likelier than this. Look-up is never asked."""

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Make = Callable[..., Engine]


def prompts() -> list[list[int]]:
    """Short ones, which all find room and then grow to five windows and more; some with a common beginning."""
    rng = random.Random(3)
    shared = [rng.randrange(60) for _ in range(24)]
    alone = [[rng.randrange(60) for _ in range(length)] for length in (1, 9, 20, 30)]
    return alone + [shared + [rng.randrange(60) for _ in range(length)] for length in (3, 9)]


PARAMS = [
    SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=80, ignore_eos=True)
    for number in range(len(prompts()))
]


@cache
def plain(family: str) -> list[list[int]]:
    """What the target says one request at a time, with no cache and no speculation."""
    llm = LLM.over(tiny_engine(target(family), enable_prefix_caching=False, **SETTINGS))
    return [tokens_of(llm.generate([prompt], wanted))[0] for prompt, wanted in zip(prompts(), PARAMS, strict=True)]


def texts(family: str) -> list[list[int]]:
    return [prompt + said for prompt, said in zip(prompts(), plain(family), strict=True)]


def tapping(case: Case) -> Callable[[str, Path], Make]:
    def prepare(family: str, directory: Path) -> Make:
        def make(**settings: Any) -> Engine:
            engine, recorder = engine_with(
                case, target(family), directory, texts(family), max_len=LIMIT, drafter_ops=NumbaOps(1), **settings
            )
            recorder.cut = "draft_confidence" in settings
            return engine

        return make

    return prepare


def draft_model(family: str, directory: Path) -> Make:
    model = target(family)

    def make(**settings: Any) -> Engine:
        inner = tiny_draft_model(model, first_layers(model, 2), block_size=PAGE_TOKENS, max_len=LIMIT)
        drafter = Recorder(inner, mostly_right(texts(family)))
        drafter.cut = "draft_confidence" in settings
        return tiny_engine(model, drafter=drafter, method="draft_model", **settings)

    return make


def look_up(family: str, directory: Path) -> Make:
    return lambda **settings: tiny_engine(target(family), speculate=True, **settings)


def going_on(family: str) -> list[list[int]]:
    text = texts(family)[-1]
    return [text[:-12], text]


@cache
def plainly_going_on(family: str) -> list[list[int]]:
    llm = LLM.over(tiny_engine(target(family), enable_prefix_caching=False, **SETTINGS))
    return tokens_of(llm.generate(going_on(family), GREEDY))


DRAFTERS: dict[str, Callable[[str, Path], Make]] = {
    "look-up": look_up,
    "draft model": draft_model,
    "eagle3": tapping(CASES["eagle3"]),
    "dflash, sliding": tapping(CASES["dflash, sliding"]),
    "mtp": tapping(ModuleCase(layout="qwen")),
}
ALL = [
    (drafter, family, cut)
    for drafter in DRAFTERS
    for family in (WITH_MODULES if drafter == "mtp" else FAMILIES)
    for cut in ((False, True) if drafter in LIKELY else (False,))
]


def short_of(engine: Engine) -> int:
    """Memory for the longest text, and no more."""
    kv = engine.scheduler.kv
    return total_bytes(kv.layout, least_pages(kv.layout, kv.config, LIMIT, K))


@pytest.mark.parametrize(("drafter", "family", "cut"), ALL)
def test_the_text_is_the_targets(drafter: str, family: str, cut: bool, tmp_path: Path) -> None:
    settings = SETTINGS | {"max_num_batched_tokens": CHUNK_TOKENS, "max_num_seqs": 6, "k": K}
    if cut:
        settings |= {"draft_confidence": LIKELY[drafter]}
    make = DRAFTERS[drafter](family, tmp_path)
    enough = short_of(make(**settings))
    preemptions = hits = 0
    # In the least memory texts push each other out; whether anything of them is left to go on from is a matter of luck
    # there, so a second engine has a little more.
    for memory in (enough, enough * 13 // 10):
        engine = make(**settings, kv_cache_memory_bytes=memory)
        llm = LLM.over(engine)
        assert engine.sanitizer is not None
        assert tokens_of(llm.generate(prompts(), PARAMS)) == plain(family)
        preemptions += engine.scheduler.num_preemptions
        assert engine.speculation.accepted_tokens > 0
        # Whoever goes on from a text that ended reads what lay under its windows, where that is still cached.
        assert [tokens_of(llm.generate([text], GREEDY))[0] for text in going_on(family)] == plainly_going_on(family)
        hits += engine.scheduler.kv.hit_tokens
    assert preemptions > 0
    assert hits > 0
