"""The real default model, against Transformers with the same weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.lossless import assert_greedy_by_reference, assert_same_or_tied, tokens_of

from outrider.api.llm import LLM
from outrider.backends.cpu.packing import CPUWeightForms
from outrider.config import DEFAULT_MODEL, EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.models.load import LoadedModel, load_model
from outrider.sampling import SamplingParams
from outrider.tools.bench.reference import reference_model

TOKENS = 128
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List the first ten prime numbers.",
    "Translate 'good morning' into French, Spanish and German.",
    "What is 17 times 23? Show your work.",
    "Write a Python function that reverses a string.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Tom has 3 boxes with 12 apples each and eats 5. How many are left?",
    "Write an email to my boss asking for a day off.",
    "Name five mammals that live in water.",
    "What happened in 1969?",
    "Repeat this list twice: red, green, blue, yellow.",
    "Who wrote 'The Origin of Species'?",
    "Describe a sunset without using the word 'red'.",
    "How do vaccines work?",
    "Count from 1 to 30.",
    "What are the pros and cons of nuclear power?",
    "Write a haiku about winter.",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Tell me a joke about cats.",
    "What is the difference between a crocodile and an alligator?",
    "Write a SQL query that counts users by country.",
    "Give three synonyms for 'happy'.",
    "How many days are in a leap year?",
    "Explain recursion.",
    "Plan a two-day trip to Rome.",
    "What does the heart do?",
    "Complete: 'To be or not to be,'",
    "Write a limerick about a programmer.",
    "How do I boil an egg?",
    "What is machine learning?",
    "Sort these numbers: 9, 2, 7, 4, 1.",
    "Write the alphabet backwards.",
    "What is the largest planet?",
    "Give advice to a first-year student.",
    "Describe how a bicycle works.",
    "Ünïcödé: was ist 2+2? 🙂",
)


@cache
def model() -> LoadedModel:
    """As an engine loads it: packed."""
    return load_model(DEFAULT_MODEL, dtype=torch.float32, forms=CPUWeightForms(packed=True))


@cache
def reference() -> Any:
    """Transformers' own Llama with the very same weights, written out."""
    return reference_model(model())


def engine_for(speculative: SpeculativeConfig | None = None, **settings: object) -> LLM:
    config = EngineConfig(
        speculative_config=speculative,
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=40,
        sanitizer="raise",
        **settings,  # type: ignore[arg-type]
    )
    return LLM.over(build_engine(config, model=model()))


@cache
def prompts() -> list[list[int]]:
    llm = engine_for()
    return [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]


@cache
def plain() -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    return tokens_of(engine_for().generate(prompts(), params))


def test_greedy_text_is_transformers_own() -> None:
    assert len(prompts()) == 40
    ties = sum(
        assert_greedy_by_reference(reference(), prompt, generated)
        for prompt, generated in zip(prompts(), plain(), strict=True)
    )
    assert sum(map(len, plain())) > 2_000
    assert ties <= 2


def test_packed_weights_are_those_that_are_written_out() -> None:
    """Rows are rounded to 16 bits before they meet packed weights: that moves a log-probability by thousandths."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
    packed = engine_for().generate(prompts()[:6], params)
    config = EngineConfig(kv_cache_memory_bytes=1 << 28, expand_weights=True)
    expanded_engine = build_engine(config)
    assert isinstance(expanded_engine.model.parameters.head.weight, torch.Tensor)
    expanded = LLM.over(expanded_engine).generate(prompts()[:6], params)
    for one, other in zip(packed, expanded, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs is not None
        assert other.outputs[0].logprobs is not None
        for near, exact in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert near.logprob == pytest.approx(exact.logprob, abs=5e-3)


@pytest.mark.parametrize(
    "speculative",
    [
        SpeculativeConfig(method="ngram", num_speculative_tokens=5),
        SpeculativeConfig(method="draft_model", model=DEFAULT_MODEL, num_hidden_layers=10, num_speculative_tokens=3),
        SpeculativeConfig(method="draft_model", model=DEFAULT_MODEL, num_hidden_layers=24, num_speculative_tokens=3),
        SpeculativeConfig(method="draft_model", model=DEFAULT_MODEL, num_speculative_tokens=3),
    ],
    ids=["ngram", "10 layers", "24 layers", "itself"],
)
def test_drafts_do_not_change_it(speculative: SpeculativeConfig) -> None:
    llm = engine_for(speculative)
    some = slice(0, 40) if speculative.method == "ngram" else slice(0, 8)
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    found = tokens_of(llm.generate(prompts()[some], params))
    assert_same_or_tied(llm.engine, prompts()[some], plain()[some], found)
    counts = llm.engine.speculation
    assert counts.drafts > 0
    if speculative.method == "draft_model" and speculative.num_hidden_layers is None:
        assert counts.acceptance_rate > 0.99


def test_a_seed_gives_the_same_text_with_and_without_drafts() -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=number, max_tokens=48)
        for number in range(8)
    ]
    alone = tokens_of(engine_for().generate(prompts()[:8], params))
    drafted = engine_for(SpeculativeConfig(method="ngram", num_speculative_tokens=5), block_size=32)
    assert tokens_of(drafted.generate(prompts()[:8], params)) == alone
    assert [
        tokens_of([drafted.generate([prompt], wanted)[0]])[0]
        for prompt, wanted in zip(prompts()[:2], params[:2], strict=True)
    ] == alone[:2]
