"""Grammars that are refused, with the reason; grammars that are followed; and the limits of both."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from typing import Any

import jsonschema_rs
import pytest
from tests.engine.tiny import tiny_engine
from tests.structured.byte_tokens import accepts, grammars, of_schema, random_text
from tests.structured.ending import ending_model
from tests.structured.many import DEFINITIONS, random_schema

from outrider.api.llm import LLM
from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.sampling import SamplingParams
from outrider.structured.matcher import Matcher

BUILD_LIMIT_S = 5.0
"""Far more than any grammar takes on an idle machine, far less than one without limits would."""


def of_gbnf(text: str) -> Matcher:
    return grammars().matcher(Grammar(kind=GrammarKind.EBNF, text=text))


@pytest.mark.parametrize("seed", range(40))
def test_output_by_a_random_schema_is_valid(seed: int) -> None:
    rng = random.Random(seed)
    schema = {**random_schema(rng), "$defs": DEFINITIONS}
    grammar, validator = of_schema(schema), jsonschema_rs.validator_for(schema, validate_formats=True)
    texts = [text for _ in range(10) if (text := random_text(grammar, rng, longest=600)) is not None]
    assert [text for text in texts if not validator.is_valid(json.loads(text))] == []
    # Written as Python writes it, but for numbers and what need not be escaped.
    assert all(("\n" not in text and "  " not in text.replace('"', "")) or '"' in text for text in texts)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.REGEX, "(ab", "parenthesis that is not closed"),
        (GrammarKind.EBNF, "start ::= x", "not found"),
        (GrammarKind.EBNF, 'start: "x"', "not valid GBNF"),
        (GrammarKind.EBNF, '%llguidance {}\nstart: "x"', "not valid GBNF"),
        (GrammarKind.EBNF, "root ::= [^a&&b]", "has one of &&"),
        (GrammarKind.EBNF, 'root ::= root "b"', "the grammar allows nothing here"),
        (GrammarKind.EBNF, "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(4000)), "1000 rules"),
        (GrammarKind.EBNF, "root ::= " + "(" * 900 + '"x"' + ")" * 900, "nested too deeply"),
        (GrammarKind.JSON_SCHEMA, '{"type":"objct"}', "objct"),
        (GrammarKind.JSON_SCHEMA, '{"x-guidance":{"lenient":true},"not":{}}', "not cannot be enforced"),
        (GrammarKind.JSON_SCHEMA, '{"const":12345678901234567890}', "beyond 2**53"),
        (GrammarKind.CHOICE, "[]", "at least one"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_reason(kind: GrammarKind, text: str, words: str) -> None:
    llm = LLM.over(tiny_engine(ending_model()))
    with pytest.raises(RequestError) as refusal:
        llm.generate([1, 2], SamplingParams(grammar=Grammar(kind=kind, text=text)))
    assert words in str(refusal.value)
    assert not llm.engine.has_work


def test_a_grammar_and_a_text_without_end_contradict_each_other() -> None:
    params = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="a"), ignore_eos=True)
    with pytest.raises(RequestError, match="ignore_eos"):
        LLM.over(tiny_engine(ending_model())).generate([1], params)


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (r'root ::= "\u0041bc" [\u0041-\u0043]', ["AbcB"], ["䆼B", "AbcD"]),
        (r"root ::= [\U0001f600-\U0001f64f] # a comment" + "\n", ["😀"], ["a"]),
        (r'root ::= "\u00e9" | "\\" | "\""', ["é", "\\", '"'], ["e"]),
        ('root ::= item ("," item){0,2}\nitem ::= [a-c]+ | "(" root ")"', ["a", "ab,(c),a"], ["a,a,a,a", "(a"]),
        ('root ::= [^"/]* "#" "%llguidance"', ["x#%llguidance"], ['"#%llguidance']),
    ],
)
def test_gbnf_means_what_llama_cpp_takes_it_to_mean(text: str, right: list[str], wrong: list[str]) -> None:
    grammar = of_gbnf(text)
    assert [each for each in right if not accepts(grammar, each)] == []
    assert [each for each in wrong if accepts(grammar, each)] == []


def test_options_in_a_schema_change_nothing() -> None:
    grammar = of_schema({"x-guidance": {"whitespace_pattern": "x*", "lenient": True}, "type": "array"})
    assert accepts(grammar, "[1, 2]")
    assert not accepts(grammar, "[x]")


def _definitions(number: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(number)}
    return {"$ref": "#/$defs/d0", "$defs": {**found, f"d{number}": {"type": "null"}}}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind=GrammarKind.REGEX, text="a?" * 30_000),
        Grammar(kind=GrammarKind.REGEX, text="((a{1000}){1000}){1000}"),
        Grammar(kind=GrammarKind.REGEX, text="([ab]*a[ab]{500}c)*"),
        Grammar(kind=GrammarKind.EBNF, text="root ::= a\na ::= b{1000}\nb ::= c{1000}\nc ::= " + '"x"? ' * 5000),
        Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_definitions(3000))),
        Grammar(
            kind=GrammarKind.JSON_SCHEMA,
            text=json.dumps({"properties": {str(number): {"type": "string"} for number in range(2500)}}),
        ),
        Grammar(
            kind=GrammarKind.JSON_SCHEMA,
            text=json.dumps({"properties": {str(number): {} for number in range(60)}, "minProperties": 3}),
        ),
        Grammar(kind=GrammarKind.CHOICE, text=json.dumps([f"{number:x}" for number in range(9000)])),
    ],
    ids=["optional", "nested", "states", "gbnf", "definitions", "properties", "cases", "choices"],
)
def test_no_grammar_takes_long(grammar: Grammar) -> None:
    """It is built, or refused for a limit; the engine's thread goes on soon either way."""
    started_s = time.monotonic()
    with suppress(RequestError):
        matcher = grammars().matcher(grammar)
        for _ in range(50):
            mask = matcher.masks([])[0]
            if mask is None or not mask.any():
                break
            matcher.accept([int(mask.nonzero()[0])])
    assert time.monotonic() - started_s < BUILD_LIMIT_S
