"""Speculation on = off, token for token, on tiny models: every drafter, page size, chunking, window and shortage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model, tiny_spec

from outrider.api.llm import LLM
from outrider.models.decoder import Decoder
from outrider.sampling import SamplingParams

WINDOWS = {"full": (None, None), "mixed": (8, None), "sliding": (5, 5)}
DRAFTERS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "ngram": lambda model, block: {"speculate": True},
    "itself": lambda model, block: {"drafter": tiny_draft_model(model, model, block_size=block)},
    "first layer": lambda model, block: {"drafter": tiny_draft_model(model, first_layers(model, 1), block_size=block)},
    "random": lambda model, block: {"drafter": tiny_draft_model(model, tiny_model(seed=5), block_size=block)},
}


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share prefixes and repeat, greedy and sampled in turns."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 60))] for _ in range(10)]
    prompts += [prompts[0], prompts[1][:10] + prompts[2], prompts[3], [7, 8, 9] * 12]
    params = [
        SamplingParams(temperature=0, max_tokens=30)
        if i % 2
        else SamplingParams(temperature=0.8, top_k=20, seed=i, max_tokens=30, presence_penalty=0.5)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module", params=WINDOWS.values(), ids=WINDOWS)
def plain(request: pytest.FixtureRequest) -> tuple[Any, list[list[int]]]:
    """A model, and what it says one request at a time, with no cache and no speculation."""
    model = tiny_model(tiny_spec(windows=request.param))
    llm = LLM.over(tiny_engine(model, enable_prefix_caching=False))
    return model, [tokens_of(llm.generate([prompt], wanted))[0] for prompt, wanted in zip(*workload(), strict=True)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_drafts_never_change_the_text(plain: Any, drafter: str, block_size: int) -> None:
    model, expected = plain
    engine = tiny_engine(model, **DRAFTERS[drafter](model, block_size), block_size=block_size)
    prompts, params = workload()
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(prompts, params)) == expected
    assert engine.speculation.drafts > 0
    # Again, now that everything is cached.
    assert tokens_of(llm.generate(prompts, params)) == expected
    assert engine.scheduler.kv.hit_tokens > 0


@pytest.mark.parametrize("drafter", ["none", "ngram", "itself", "first layer"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_of_any_size_give_the_same_text(plain: Any, drafter: str, chunk: int) -> None:
    model, expected = plain
    settings = DRAFTERS[drafter](model, 16) if drafter != "none" else {}
    seats = min(16, max(1, chunk // 2))
    engine = tiny_engine(model, **settings, max_num_batched_tokens=chunk + seats, max_num_seqs=seats)
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected


@pytest.mark.parametrize("drafter", ["none", "ngram", "itself", "first layer"])
def test_preemption_gives_the_same_text(plain: Any, drafter: str) -> None:
    model, expected = plain
    settings = DRAFTERS[drafter](model, 8) if drafter != "none" else {}
    # Little more than one request of the largest size needs, so that many cannot stay.
    layers = {"none": 2, "ngram": 2, "first layer": 3, "itself": 4}[drafter]
    memory = 180 * layers * 2 * model.spec.kv_size * 4
    engine = tiny_engine(model, **settings, block_size=8, kv_cache_memory_bytes=memory, max_model_len=128)
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected
    if model.spec.layers[0].window is None:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("batch", [1, 2, 5, 32])
def test_neighbours_make_no_difference(plain: Any, batch: int) -> None:
    model, expected = plain
    prompts, params = workload()
    llm = LLM.over(tiny_engine(model, speculate=True, max_num_seqs=batch))
    found: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        found += tokens_of(llm.generate(prompts[start : start + batch], params[start : start + batch]))
    assert found == expected


@pytest.mark.parametrize("k", [1, 2, 3, 7, 15])
def test_any_number_of_drafts_gives_the_same_text(plain: Any, k: int) -> None:
    model, expected = plain
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), k=k, max_num_batched_tokens=512)
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected


def test_a_drafter_that_agrees_always_is_accepted_always(plain: Any) -> None:
    model, _expected = plain
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), k=3)
    LLM.over(engine).generate([[1, 2, 3]], SamplingParams(temperature=1.0, seed=3, max_tokens=33))
    counts = engine.speculation
    assert counts.accepted_tokens == counts.draft_tokens > 0
    # 1 from the prompt, then 3 drafts and the target's own each time.
    assert counts.mean_acceptance_length == 4.0


def test_rows_that_are_sampled_side_by_side_are_scored_with_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[int] = []
    score = Decoder.logits

    def counted(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        apart.append(len(hidden))
        return score(decoder, hidden)

    monkeypatch.setattr(Decoder, "logits", counted)
    llm = LLM.over(tiny_engine(backend="cpu", num_threads=1, speculate=True))
    llm.generate([[7, 8, 9, 7, 8, 9, 7]], SamplingParams(temperature=0, max_tokens=12))
    assert apart == []
    # Of two prompts in one step, the last rows do not lie side by side.
    llm.generate([[1, 2, 3], [4, 5, 6, 7]], SamplingParams(temperature=0, max_tokens=1))
    assert apart == [2]
