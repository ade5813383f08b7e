"""Outputs in a given form: valid, and the same with every drafter, in any company, however often they are preempted."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema_rs
import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine
from tests.speculative.cases import CASES, engine_with
from tests.structured.ending import EOS, ending_model

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.grammar import Grammar, GrammarKind
from outrider.sampling import SamplingParams

SCHEMA = (
    '{"type":"object","properties":{"kind":{"enum":["cat","dog"]},"age":{"type":"integer","minimum":0,"maximum":99},'
    '"tags":{"type":"array","items":{"type":"string","pattern":"^[a-d]{1,3}$"},"maxItems":3},"is_old":{"type":"boolean"}},'
    '"required":["kind","age","tags"],"additionalProperties":false}'
)
SCHEMA_OBJECT = json.loads(SCHEMA)
PATTERN = "(ab|cd){2,8}[0-9]{1,4}(, (yes|no)){0,3}\\."
GRAMMARS = (
    Grammar(kind=GrammarKind.JSON_SCHEMA, text=SCHEMA),
    Grammar(kind=GrammarKind.REGEX, text=PATTERN),
    Grammar(kind=GrammarKind.CHOICE, text='["yes, of course", "yes, but", "no"]'),
)
PROMPTS = [[5, 6, 7, 8] * 5, [9, 1], list(range(30)), [70] * 17]


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, params = [], []
    for number, prompt in enumerate(PROMPTS):
        for grammar in GRAMMARS:
            for settings in (
                {"temperature": 0.0},
                {"temperature": 1.0, "seed": number, "top_p": 0.9},
                {"temperature": 0.8, "seed": number, "repetition_penalty": 1.3, "min_tokens": 8},
            ):
                prompts.append(prompt)
                params.append(SamplingParams(grammar=grammar, max_tokens=120, **settings))  # type: ignore[arg-type]
        prompts.append(prompt)
        params.append(SamplingParams(temperature=0, max_tokens=20))
    return prompts, params


def is_valid(grammar: Grammar, text: str) -> bool:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return jsonschema_rs.is_valid(SCHEMA_OBJECT, json.loads(text))
    if grammar.kind is GrammarKind.REGEX:
        return re.fullmatch(PATTERN, text) is not None
    return text in ("yes, of course", "yes, but", "no")


def assert_valid(outputs: list[RequestOutput], params: list[SamplingParams]) -> None:
    for output, wanted in zip(outputs, params, strict=True):
        assert output.error is None
        if wanted.grammar is not None:
            for said in output.outputs:
                assert said.finish_reason == "stop"
                assert said.token_ids[-1] == EOS
                assert is_valid(wanted.grammar, said.text), said.text


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One request at a time, with no cache and no speculation."""
    llm = LLM.over(tiny_engine(ending_model(), enable_prefix_caching=False))
    outputs = [llm.generate([prompt], wanted)[0] for prompt, wanted in zip(*workload(), strict=True)]
    assert_valid(outputs, workload()[1])
    return tokens_of(outputs)


def drafting_engine(name: str, directory: Path, expected: list[list[int]]) -> Engine:
    model = ending_model()
    if name == "lookup":
        return tiny_engine(model, speculate=True)
    if name == "small model":
        return tiny_engine(model, drafter=tiny_draft_model(model, first_layers(model, 2)), method="draft_model")
    texts = [prompt + said for prompt, said in zip(workload()[0], expected, strict=True)]
    return engine_with(CASES[name], model, directory, texts, block_size=16)[0]


@pytest.mark.parametrize("name", ["lookup", "small model", "full", "eagle", "eagle3", "mtp, qwen"])
def test_drafts_never_change_the_text(name: str, expected: list[list[int]], tmp_path: Path) -> None:
    engine = drafting_engine(name, tmp_path, expected)
    outputs = LLM.over(engine).generate(*workload())
    assert tokens_of(outputs) == expected
    assert_valid(outputs, workload()[1])
    assert engine.speculation.accepted_tokens > 0


def test_preempted_requests_keep_their_place_in_the_grammar(expected: list[list[int]]) -> None:
    engine = tiny_engine(ending_model(), speculate=True, kv_cache_memory_bytes=1 << 18, max_model_len=160)
    outputs = LLM.over(engine).generate(*workload())
    assert engine.scheduler.num_preemptions > 0
    assert tokens_of(outputs) == expected


def test_no_draft_is_proposed_that_the_grammar_refuses() -> None:
    """After "Qxy" the prompt went on with "Q", which is what a look-up copies; the grammar wants another "xy"."""
    engine = tiny_engine(ending_model(), speculate=True)
    encode = ending_model().tokenizer.encode
    grammar = Grammar(kind=GrammarKind.REGEX, text="(xy){10}")
    engine.add_request("a", encode("xyQxyQ"), SamplingParams(temperature=0, grammar=grammar, max_tokens=30))
    output, proposed = engine.output("a"), set()
    while engine.has_work:
        engine.step()
        for request in engine.runner.requests.values():
            proposed.update(request.drafts)
    assert output.outputs[0].text == "xy" * 10
    assert proposed == set(encode("xy"))


def test_a_model_whose_text_cannot_end_refuses_a_form() -> None:
    assert not tiny_engine(replace(ending_model(), eos_ids=())).supports_grammars
