"""Where the engine chooses how much is drafted, the text is the target's whatever it chooses.

The choice is drawn at random for every step and request: drafts are verified, cut off or left out; the drafter proposes
or does not; and what was looked up takes the place of what it proposed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.pacing import choose_at_random
from tests.engine.test_lossless import WINDOWS, workload
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model, tiny_spec
from tests.speculative.cases import ONE_OF_EACH, engine_with

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams

DRAFTERS = ("ngram", "draft model", *ONE_OF_EACH)
Plain = tuple[LoadedModel, list[list[int]]]


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, too: what follows in them is looked up, and seldom what comes."""
    prompts, params = workload()
    repeating = [[start + place for place in range(6)] * 6 for start in range(0, 60, 10)]
    params += [SamplingParams(temperature=0.5 * (number % 2), seed=3, max_tokens=30) for number in range(6)]
    return prompts + repeating, params


def texts(expected: list[list[int]]) -> list[list[int]]:
    return [prompt + said for prompt, said in zip(asked()[0], expected, strict=True)]


@pytest.fixture(scope="module", params=["full", "mixed"])
def plain(request: pytest.FixtureRequest) -> Plain:
    """A model, and what it says one request at a time, with no cache and no speculation."""
    windows = WINDOWS[request.param]
    model = tiny_model(tiny_spec(windows=(*windows, windows[0])))
    llm = LLM.over(tiny_engine(model, enable_prefix_caching=False))
    return model, [tokens_of(llm.generate([prompt], wanted))[0] for prompt, wanted in zip(*asked(), strict=True)]


def choosing(drafter: str, plain: Plain, directory: Path, **settings: Any) -> Engine:
    """An engine that chooses, with a drafter that is right in part."""
    model, expected = plain
    settings = {"block_size": 8, "k": None} | settings
    if drafter == "ngram":
        return tiny_engine(model, speculate=True, **settings)
    if drafter == "draft model":
        small = tiny_draft_model(model, first_layers(model, 2), block_size=8)
        return tiny_engine(model, drafter=small, method="draft_model", **settings)
    engine, recorder = engine_with(ONE_OF_EACH[drafter], model, directory, texts(expected), **settings)
    recorder.cut = True
    return engine


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_choice_that_changes_at_every_step_never_changes_the_text(plain: Plain, drafter: str, tmp_path: Path) -> None:
    engine = choosing(drafter, plain, tmp_path)
    seen = choose_at_random(engine, texts(plain[1]))
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(*asked())) == plain[1]
    assert 0 < engine.speculation.accepted_tokens < engine.speculation.draft_tokens
    for what in ("left out", "cut off", "plain", "not proposed for", "from OWN_TEXT"):
        assert seen[what] > 0, what
    assert (seen["from DRAFTER"] > 0) == (drafter != "ngram")
    # Again, now that everything is cached, and that all texts may be copied from.
    assert tokens_of(llm.generate(*asked())) == plain[1]
    assert engine.scheduler.kv.hit_tokens > 0
    assert seen["from SHARED_TEXT"] > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_its_own_choice_never_changes_the_text(plain: Plain, drafter: str, tmp_path: Path) -> None:
    engine = choosing(drafter, plain, tmp_path)
    llm = LLM.over(engine)
    for _ in range(2):
        assert tokens_of(llm.generate(*asked())) == plain[1]
    assert engine.pacer is not None
    assert engine.pacer.counts.drafting_steps + engine.pacer.counts.plain_steps > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_shortage_gives_the_same_text(plain: Plain, drafter: str, tmp_path: Path) -> None:
    """Draft pages are given up first, then requests are preempted; the text of both is the same."""
    model, expected = plain
    target_bytes = len(model.spec.layers) * 2 * model.spec.kv_size * 4
    drafter_bytes = {"ngram": 0, "draft model": 2 * 2 * model.spec.kv_size * 4}.get(drafter, 2 * 2 * 32 * 4)
    memory = 180 * (target_bytes + drafter_bytes)
    engine = choosing(drafter, plain, tmp_path, kv_cache_memory_bytes=memory, max_model_len=128)
    choose_at_random(engine, texts(expected), seed=1)
    assert tokens_of(LLM.over(engine).generate(*asked())) == expected
    if model.spec.layers[0].window is None:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_small_chunks_give_the_same_text(plain: Plain, drafter: str, tmp_path: Path) -> None:
    """Rows are short, so looked-up drafts are cut to what fits into a step."""
    engine = choosing(drafter, plain, tmp_path, max_num_batched_tokens=22, max_num_seqs=5)
    choose_at_random(engine, texts(plain[1]), seed=2)
    assert tokens_of(LLM.over(engine).generate(*asked())) == plain[1]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_several_continuations_are_those_of_the_plain_target(plain: Plain, drafter: str, tmp_path: Path) -> None:
    model, _expected = plain
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=20, frequency_penalty=0.3)
    prompts = [[5, 6, 7] * 11, [9] * 16]
    expected = tokens_of(LLM.over(tiny_engine(model)).generate(prompts, params))
    engine = choosing(drafter, plain, tmp_path)
    seen = choose_at_random(engine, [prompts[number // 3] + said for number, said in enumerate(expected)], seed=3)
    assert tokens_of(LLM.over(engine).generate(prompts, params)) == expected
    assert engine.speculation.draft_tokens > 0
    assert seen["left out"] > 0


def test_a_draft_that_ends_the_text_counts_as_accepted(plain: Plain) -> None:
    """The rest of its drafts is cut off with the text, which says nothing about them."""
    model, _expected = plain
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), method="draft_model", k=None)
    assert engine.pacer is not None
    engine.pacer.forced = (4, 4)
    told = []
    note = engine.pacer.verified

    def verified(request: Any, *, drafts: int, accepted: int) -> None:
        told.append((drafts, accepted))
        note(request, drafts=drafts, accepted=accepted)

    engine.pacer.verified = verified  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=20)
    llm = LLM.over(engine)
    (said,) = tokens_of(llm.generate([[1, 2, 3]], params))
    place = next(place for place in range(6, 20) if said.index(said[place]) == place)
    told.clear()
    (cut,) = tokens_of(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, stop_token_ids=[said[place]])))
    assert cut == said[: place + 1]
    assert told
    assert all(drafts == accepted for drafts, accepted in told)
