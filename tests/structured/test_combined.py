"""Forms together with everything else that a request can ask for, and beside requests whose form is bad."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lossless import tokens_of
from tests.engine.pacing import choose_at_random
from tests.engine.tiny import VOCABULARY, first_layers, tiny_draft_model, tiny_engine
from tests.speculative.cases import CASES, engine_with
from tests.structured.ending import EOS, ending_model, spelt
from tests.structured.test_output import GRAMMARS, PROMPTS, is_valid

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.grammar import Grammar, GrammarKind
from outrider.sampling import SamplingParams
from outrider.speculative.drafter import DrawRow
from outrider.speculative.vocabulary import DraftVocabulary

LONG = [(7 * number) % 180 for number in range(90)]


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def drafting(**settings: Any) -> Engine:
    model = ending_model()
    drafter = tiny_draft_model(model, first_layers(model, 2))
    return tiny_engine(model, drafter=drafter, method="draft_model", **settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "logit_bias against the form": {"logit_bias": {3: 100.0, EOS: -100.0}},
    "logit_bias towards the end": {"logit_bias": {EOS: 100.0}},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "seed": {"temperature": 1.2, "seed": 11, "top_k": 20},
    "min_p": {"temperature": 1.0, "seed": 5, "min_p": 0.2},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 1.0, "min_tokens": 5},
    "min_tokens past the end": {"min_tokens": 90},
    "continuations": {"n": 3, "temperature": 1.0, "seed": 2},
}


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, params = [], []
    for settings in SETTINGS.values():
        for grammar in GRAMMARS:
            prompts.append(LONG if grammar is GRAMMARS[0] else PROMPTS[0])
            params.append(SamplingParams(**({"temperature": 0.0, "max_tokens": 120, "grammar": grammar} | settings)))
    return prompts, params


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """One request at a time, with no cache and no speculation."""
    llm = LLM.over(tiny_engine(ending_model(), enable_prefix_caching=False))
    found = []
    for prompt, params in zip(*asked(), strict=True):
        output = llm.generate(prompt, params)[0]
        assert output.error is None
        for said in output.outputs:
            assert said.finish_reason == "stop", params
            assert said.token_ids[-1] == EOS, params
            assert params.grammar is not None
            assert is_valid(params.grammar, said.text), (params, said.text)
        found.append([said.token_ids for said in output.outputs])
    return found


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 8},
        {"kv_cache_memory_bytes": 1 << 19, "max_model_len": 220},
        {"draft_confidence": 0.3},
    ],
    ids=["together", "chunked prefill", "few pages", "confidence"],
)
def test_every_setting_gives_the_same_text_with_drafts(engine: dict[str, Any], alone: list[list[list[int]]]) -> None:
    confidence = engine.pop("draft_confidence", 0.0)
    built = drafting(**engine)
    built.runner.drafting.least_confidence = confidence
    llm = LLM.over(built)
    for _ in range(2):  # the second time prompts are in the cache
        outputs = llm.generate(*asked())
        assert [[said.token_ids for said in output.outputs] for output in outputs] == alone
    assert built.speculation.accepted_tokens > 0
    assert (built.scheduler.num_preemptions > 0) == ("kv_cache_memory_bytes" in engine)
    assert any(output.metrics.cached_tokens for output in outputs)
    for output, params in zip(outputs, asked()[1], strict=True):
        if params.logprobs is not None:
            for said in output.outputs:
                assert said.logprobs is not None
                assert len(said.logprobs) == len(said.token_ids)


@pytest.mark.parametrize("drafter", ["lookup", "small model", "full", "eagle3"])
def test_a_choice_that_changes_at_every_step_gives_the_same_text(
    drafter: str, alone: list[list[list[int]]], tmp_path: Path
) -> None:
    if drafter == "lookup":
        built = tiny_engine(ending_model(), speculate=True, k=None)
    elif drafter == "small model":
        built = drafting(k=None, max_num_batched_tokens=32, max_num_seqs=8)
    else:
        built, recorder = engine_with(CASES[drafter], ending_model(), tmp_path, k=None)
        recorder.cut = True
    prompts, params = asked()
    firsts = [each[0] for each in alone]
    texts = [prompt + said for prompt, said in zip(prompts, firsts, strict=True)]
    seen = choose_at_random(built, texts)
    llm = LLM.over(built)
    for _ in range(2):  # the second time prompts are in the cache, and texts may be copied
        outputs = llm.generate(prompts, params)
        assert [[said.token_ids for said in output.outputs] for output in outputs] == alone
    assert built.speculation.accepted_tokens > 0
    for source in ("GRAMMAR", "OWN_TEXT", "SHARED_TEXT"):
        assert seen[f"from {source}"] > 0, source


@pytest.mark.parametrize("speculate", [False, True])
def test_a_stop_string_cuts_a_form_off(speculate: bool) -> None:
    llm = LLM.over(tiny_engine(ending_model(), speculate=speculate))
    said = llm.generate(PROMPTS[0], SamplingParams(temperature=0, grammar=regex("abcd{20}"), stop="dd", max_tokens=60))
    assert said[0].outputs[0].text == "abc"
    assert said[0].outputs[0].finish_reason == "stop"
    assert said[0].outputs[0].stop_reason == "dd"


def test_a_stop_token_ends_a_form_and_max_tokens_cuts_it_off() -> None:
    llm = LLM.over(tiny_engine(ending_model(), speculate=True))
    (stop,) = spelt("d")
    params = SamplingParams(temperature=0, grammar=regex("abcd{20}"), stop_token_ids=[stop], max_tokens=60)
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].stop_reason == stop
    cut = llm.generate(PROMPTS[0], SamplingParams(temperature=0, grammar=regex("abcd{20}"), max_tokens=5))[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ("abcdd", "length")


def test_each_of_several_ends_of_text_ends_a_form() -> None:
    model = replace(ending_model(), eos_ids=(EOS, 201))
    for end in model.eos_ids:
        llm = LLM.over(tiny_engine(model, speculate=True))
        params = SamplingParams(temperature=0, grammar=regex("(ab){3,9}"), logit_bias={end: 100.0}, max_tokens=60)
        said = llm.generate(PROMPTS[0], params)[0].outputs[0]
        assert said.text == "ababab"
        assert said.token_ids[-1] == end


@pytest.mark.parametrize("text", ["é🙂日本", 'a"\\b', "\n\t"])
def test_characters_of_several_bytes_are_written_whole(text: str) -> None:
    llm = LLM.over(drafting())
    choice = Grammar(kind=GrammarKind.CHOICE, text=json.dumps([text]))
    schema = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"enum": [{text: [text]}]}))
    said = llm.generate(
        [PROMPTS[0]] * 2, [SamplingParams(temperature=0, grammar=g, max_tokens=90) for g in (choice, schema)]
    )
    assert said[0].outputs[0].text == text
    assert json.loads(said[1].outputs[0].text) == {text: [text]}


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_that_can_go_no_further_ends_alone(count: int) -> None:
    """Its form and its settings leave no token at all; nobody else notices."""
    engine = drafting()
    llm = LLM.over(engine)
    good = SamplingParams(temperature=0, grammar=GRAMMARS[1], max_tokens=100)
    expected = tokens_of(llm.generate([PROMPTS[0], PROMPTS[2]], [good] * 2))
    dead = Grammar(kind=GrammarKind.EBNF, text='root ::= "ab" rest\nrest ::= rest "c"')
    bad = [
        SamplingParams(temperature=1, n=count, grammar=dead, max_tokens=50),
        SamplingParams(temperature=1, n=count, grammar=regex("abc"), allowed_token_ids=spelt("ab"), max_tokens=50),
    ]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[2]]
    outputs = llm.generate(prompts, [good, *bad, good])
    assert tokens_of([outputs[0], outputs[3]]) == expected
    for output in outputs[1:3]:
        assert output.error is not None
        assert "no token may be chosen" in output.error
    assert not engine.has_work


def test_drafts_of_a_smaller_vocabulary_keep_to_the_form() -> None:
    engine = tiny_engine(ending_model(), speculate=True)
    params = SamplingParams(temperature=0, grammar=regex("[ab]c"))
    engine.add_request("a", [1, 2, 3], params)
    engine.step()
    (request,) = engine.runner.requests.values()
    request.sampling.matcher = engine.grammars.matcher(regex("[ab]c"))  # type: ignore[union-attr]
    request.begin_drafting()
    kept = spelt("bcxyz")
    vocabulary = DraftVocabulary(size=VOCABULARY, target_ids=torch.tensor(kept))
    # What the drafter would rather say breaks the form.
    logits = torch.tensor([[0.0, 1.0, 5.0, 6.0, 7.0]] * 2)
    first, second = spelt("bc")
    rows = [DrawRow(request, 4, ()), DrawRow(request, 5, (first,))]
    assert engine.runner.drafting._draw(logits, rows, vocabulary) == [first, second]
    # Where it has no token that fits, none is proposed.
    none = DraftVocabulary(size=VOCABULARY, target_ids=torch.tensor(spelt("vwxyz")))
    request.begin_drafting()
    request.propose(engine.runner.drafting._draw(logits, rows, none), 0.0)
    assert request.drafts == []
