"""Grammars are compiled off the step loop, once each, within limits; special tokens are in none."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from tests.engine.tiny import tiny_engine
from tests.matching.listed import ending_model, tiny_table
from tests.server.tiny_model import real_text

from outrider.api.async_llm import AsyncLLM
from outrider.api.llm import LLM
from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.matching import grammars as grammars_module
from outrider.matching.grammars import Grammars
from outrider.matching.tokens import token_table
from outrider.sampling import SamplingParams

CPU = torch.device("cpu")
SLOW = Grammar(
    kind=GrammarKind.JSON_SCHEMA,
    text=json.dumps(
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": "(a|b|c){1,300}x(d|e){1,300}"} for i in range(200)},
        }
    ),
)


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.REGEX, "(ab", "parenthesis is not closed"),
        (GrammarKind.EBNF, "start ::= x", "root"),
        (GrammarKind.JSON_SCHEMA, '{"type":"objct"}', "objct"),
        (GrammarKind.JSON_SCHEMA, '{"$ref":"#/$defs/x"}', "$defs"),
        (GrammarKind.JSON_SCHEMA, '{"properties":{"a":{"not":{}}}}', "properties 'a': not cannot be kept to"),
        (GrammarKind.JSON_SCHEMA, '{"items":{"uniqueItems":true}}', "items: uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"allOf":[{"type":"string"},{"maxLength":3}]}', "write them as one"),
        (GrammarKind.JSON_SCHEMA, '{"properties":{"a":7}}', "a schema is an object"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_reason(kind: GrammarKind, text: str, words: str) -> None:
    llm = LLM.over(tiny_engine(ending_model()))
    with pytest.raises(RequestError) as refusal:
        llm.generate([1, 2], SamplingParams(grammar=Grammar(kind=kind, text=text)))
    assert words in str(refusal.value)
    assert ".cc:" not in str(refusal.value)
    assert not llm.engine.has_work


def test_a_grammar_and_a_text_without_end_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        LLM.over(tiny_engine(ending_model())).generate([1], SamplingParams(grammar=regex("a"), ignore_eos=True))


def test_what_takes_too_long_is_refused_and_the_next_is_served() -> None:
    grammars = Grammars(tiny_table(), device=CPU, limit_s=0.5)
    grammars.prepare()
    with pytest.raises(RequestError, match=r"took longer than 0\.5 s"):
        grammars.compile(SLOW).result()
    assert Grammars(tiny_table(), device=CPU, limit_s=60).compile(regex("ab")).result() is not None


def test_a_grammar_is_compiled_once_and_forgotten_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "KEPT_MAX", 2)
    grammars = Grammars(tiny_table(), device=CPU, limit_s=60)
    first = grammars.compile(regex("a"))
    first.result()
    assert grammars.compile(regex("a")) is first
    for text in ("b", "c", "d"):
        grammars.compile(regex(text)).result()
    # Whoever is told of a result may be told before it is entered.
    grammars._worker.shutdown(wait=True)
    assert [grammar.text for grammar in grammars._kept] == ["c", "d"]


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    """The slow one is refused in the end; the plain one has long been answered."""
    engine = tiny_engine(ending_model())
    engine.grammars = Grammars(tiny_table(), device=CPU, limit_s=3)
    engine.grammars.prepare()
    order: list[str] = []

    async def ask(llm: AsyncLLM, name: str, params: SamplingParams) -> None:
        try:
            async for _ in llm.generate({"prompt_token_ids": [1, 2, 3]}, params):
                pass
        except RequestError:
            name += " refused"
        order.append(name)

    async def both() -> None:
        async with AsyncLLM(llm=LLM.over(engine)) as llm:
            slow = asyncio.create_task(ask(llm, "slow", SamplingParams(grammar=SLOW)))
            await asyncio.sleep(0)
            await ask(llm, "plain", SamplingParams(temperature=0, max_tokens=4))
            await slow

    asyncio.run(both())
    assert order == ["plain", "slow refused"]


def test_no_grammar_allows_a_special_token() -> None:
    """Not even where the text of one would fit."""
    tokenizer = real_text().tokenizer
    size = tokenizer.vocab_size + 5  # padded, as models are
    table = token_table(tokenizer, vocab_size=size, eos_ids=[2])
    assert tokenizer.special_ids
    grammars = Grammars(table, device=CPU, limit_s=60)
    matcher = grammars.matcher(grammars.compile(regex("[^\\n]*")).result())
    (mask,) = matcher.masks([])
    assert mask is not None
    allowed = set(mask.nonzero()[:, 0].tolist())
    assert allowed & set(tokenizer.special_ids) == {2}
    assert not allowed & set(range(tokenizer.vocab_size, size))
    text = "a <b> é 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert matcher.count_allowed(ids) == len(ids)
    assert b"".join(table.spelling[token] for token in ids).decode() == text


def test_pieces_are_spelt_with_spaces_and_raw_bytes() -> None:
    import tokenizers
    from tokenizers import decoders, models

    from outrider.models.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(
        models.BPE({"▁a": 0, "b▁": 1, "<0xC3>": 2, "<0xA9>": 3, "</s>": 4}, [], byte_fallback=True)
    )
    backend.add_special_tokens(["</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    table = token_table(Tokenizer(backend, source="test", eos_ids=[4]), vocab_size=6, eos_ids=[4])
    assert table.spelling == [b" a", b"b ", b"\xc3", b"\xa9", b"", b""]
    grammars = Grammars(table, device=CPU, limit_s=60)
    matcher = grammars.matcher(grammars.compile(regex(" aé?")).result())
    assert matcher.count_allowed([0, 2, 3, 4]) == 4
    assert matcher.count_allowed([0, 3]) == 1
