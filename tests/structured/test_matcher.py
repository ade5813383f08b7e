"""Masks at every position, against a grammar whose outputs are listed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.server.tiny_model import real_text
from tests.structured.byte_tokens import END, grammars
from tests.structured.ending import EOS, spelt, tiny_table

from outrider.backends.reference.backend import ReferenceBackend
from outrider.grammar import Grammar, GrammarKind
from outrider.runner.sampler import RequestSampling, Sampler
from outrider.sampling import SamplingParams
from outrider.structured import grammars as grammars_module
from outrider.structured.grammars import Grammars
from outrider.structured.matcher import Matcher
from outrider.structured.tokens import token_table

OUTPUTS = ("abc", "abd", "ab", "b", "cccccc", "ccd", 'c"\\x', "cé")
CPU = torch.device("cpu")


def matcher_of_choices() -> Matcher:
    grammar = Grammar(kind=GrammarKind.CHOICE, text=json.dumps(OUTPUTS))
    return Grammars(tiny_table(), device=CPU).matcher(grammar)


def ids(mask: torch.Tensor | None) -> set[int] | None:
    return None if mask is None else set(mask.nonzero()[:, 0].tolist())


def listed(taken: Sequence[int]) -> set[int] | None:
    """Returns what may follow these tokens, by comparing strings; None if nothing may."""
    table = tiny_table()
    text = b"".join(table.spelling[token] for token in taken)
    outputs = [output.encode() for output in OUTPUTS]
    if EOS in taken or not any(output.startswith(text) for output in outputs):
        return None
    going_on = {
        token
        for token, spelling in enumerate(table.spelling)
        if spelling and any(output.startswith(text + spelling) for output in outputs)
    }
    return going_on | ({EOS} if text in outputs else set())


def test_each_row_sees_the_drafts_before_it_and_no_others() -> None:
    rng = random.Random(0)
    for _ in range(40):
        matcher, taken = matcher_of_choices(), list[int]()
        while (allowed := listed(taken)) is not None:
            drafts = [rng.choice([*spelt("abcdé"), EOS, 3]) for _ in range(rng.randrange(5))]
            expected = [listed([*taken, *drafts[:n]]) for n in range(len(drafts) + 1)]
            for n, draft in enumerate(drafts):
                if expected[n] is None or draft not in (expected[n] or ()):
                    expected[n + 1 :] = [None] * (len(drafts) - n)
            assert [ids(mask) for mask in matcher.masks(drafts)] == expected
            assert ids(matcher.mask_after(drafts)) == expected[-1]
            followed = [n for n, draft in enumerate(drafts) if draft in (expected[n] or ())]
            assert matcher.count_allowed(drafts) == len(followed)
            taken.append(rng.choice(sorted(allowed)))
            matcher.accept([taken[-1]])
        assert matcher.masks([]) == [None]


def test_a_fork_goes_its_own_way() -> None:
    matcher = matcher_of_choices()
    matcher.accept(spelt("ab"))
    twin = matcher.fork()
    matcher.accept([*spelt("c"), EOS, *spelt("zz")])
    assert matcher.masks([]) == [None]
    assert ids(twin.masks([])[0]) == listed(spelt("ab"))


def test_a_mask_is_a_function_of_the_tokens_before_it() -> None:
    """It does not depend on which drafts were looked at on the way: else text with drafts would differ."""
    schema = {"type": "object", "properties": {"name": {"enum": ["abc", "abd"]}, "of": {"type": "integer"}}}
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps({**schema, "required": ["name", "of"]}))
    tokenizer = real_text().tokenizer
    real = Grammars(token_table(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=[2]), device=CPU)
    rng = random.Random(0)
    for _ in range(5):
        looking, taken = real.matcher(grammar), list[int]()
        while 2 not in taken and len(taken) < 40:
            fresh = real.matcher(grammar)
            fresh.accept(taken)
            mask = ids(fresh.masks([])[0])
            forced = fresh.fork().forced(8)
            assert looking.forced(8) == forced
            looking.masks([*forced, *(rng.randrange(tokenizer.vocab_size) for _ in range(3))])
            assert ids(looking.masks([])[0]) == mask
            assert mask
            taken.append(rng.choice(sorted(mask)))
            looking.accept(taken[-1:])


def test_a_token_is_forced_where_the_mask_leaves_no_other() -> None:
    tokenizer = real_text().tokenizer
    real = Grammars(token_table(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=[2]), device=CPU)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    matcher = real.matcher(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))
    forced = matcher.forced(20)
    assert tokenizer.decode(forced).startswith('{"name":')
    assert [ids(mask) for mask in matcher.masks(forced)[: len(forced)]] == [{token} for token in forced]
    assert matcher.forced(2) == forced[:2]
    matcher.accept([*forced, *tokenizer.encode("Ann", add_special_tokens=False)])
    assert matcher.forced(20) == []


def test_a_limit_that_a_draft_exceeds_does_not_end_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    few = LLParserLimits(max_items_in_row=4, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "_limits", lambda: few)
    text = 'root ::= "x" | "y" (a | b | c | d | e)\n' + "".join(f'{n} ::= "{n}" root? "{n}"\n' for n in "abcde")
    matcher = grammars().matcher(Grammar(kind=GrammarKind.EBNF, text=text))
    first, after = matcher.masks([ord("y")])
    assert ids(first) == {ord("x"), ord("y")}
    assert ids(after) in (set(), None)
    assert ids(matcher.masks([])[0]) == ids(first)
    matcher.accept([ord("x")])
    assert ids(matcher.masks([])[0]) == {END}


def test_a_fork_whose_drafts_exceed_a_limit_stays_at_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    few = LLParserLimits(max_items_in_row=4, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "_limits", lambda: few)
    tail = "".join(f'{n} ::= "{n}" more? "{n}"\n' for n in "abcde")
    text = 'root ::= "p" "q" more\nmore ::= "x" | "y" (a | b | c | d | e)\n' + tail
    matcher = grammars().matcher(Grammar(kind=GrammarKind.EBNF, text=text))
    matcher.accept([ord("p")])
    twin = matcher.fork()
    matcher.accept([ord("q")])
    for state, next_token in ((twin, "q"), (matcher, "x")):
        drafts = [ord(letter) for letter in ("qy" if state is twin else "y")]
        assert ids(state.masks(drafts)[-1]) in (set(), None)
        assert ord(next_token) in (ids(state.masks([])[0]) or ())
    assert ids(twin.masks([])[0]) == {ord("q")}
    assert ids(matcher.masks([])[0]) == {ord("x"), ord("y")}


def test_no_grammar_allows_a_special_token() -> None:
    """Not even where its text would fit."""
    tokenizer = real_text().tokenizer
    size = tokenizer.vocab_size + 5  # padded, as models are
    table = token_table(tokenizer, vocab_size=size, eos_ids=[2])
    assert tokenizer.special_ids
    matcher = Grammars(table, device=CPU).matcher(Grammar(kind=GrammarKind.REGEX, text="[^\\n]*"))
    allowed = ids(matcher.masks([])[0])
    assert allowed is not None
    assert allowed & set(tokenizer.special_ids) == {2}
    assert not allowed & set(range(tokenizer.vocab_size, size))
    text = "a <b> é 🙂"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert matcher.count_allowed(tokens) == len(tokens)
    assert b"".join(table.spelling[token] for token in tokens).decode() == text


def test_pieces_are_spelt_with_spaces_and_raw_bytes() -> None:
    import tokenizers
    from tokenizers import decoders, models

    from outrider.models.tokenizer import Tokenizer

    vocabulary = {"▁a": 0, "b▁": 1, "<0xC3>": 2, "<0xA9>": 3, "</s>": 4, "▁": 6, "a": 7}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.add_special_tokens(["</s>"])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    table = token_table(Tokenizer(backend, source="test", eos_ids=[4]), vocab_size=8, eos_ids=[4])
    assert table.spelling == [b" a", b"b ", b"\xc3", b"\xa9", b"", b"", b" ", b"a"]
    matcher = Grammars(table, device=CPU).matcher(Grammar(kind=GrammarKind.REGEX, text="( a|a)é?"))
    assert matcher.count_allowed([0, 2, 3, 4]) == 4
    assert matcher.count_allowed([0, 3]) == 1


def sampling(**settings: Any) -> RequestSampling:
    output = settings.pop("output", ())
    params = SamplingParams(temperature=0, **settings)
    return RequestSampling(
        params, vocab_size=256, device=CPU, eos_token_ids=[EOS], matcher=matcher_of_choices(), output=output
    )


def test_sampling_obeys_the_mask_of_each_row() -> None:
    logits = torch.zeros(4, 256)
    logits[:, 3] = 9.0  # the model's own choice is allowed nowhere
    logits[:, EOS] = 5.0
    rows = sampling().rows(10, tuple(spelt("abc")))
    assert [row.position for row in rows] == [10, 11, 12, 13]
    tokens = Sampler(256, ReferenceBackend()).sample(logits, rows).tokens
    assert tokens[0] in spelt("abc")
    assert tokens[1:] == [*spelt("b"), EOS, EOS]


def test_min_tokens_holds_until_the_grammar_leaves_only_the_end() -> None:
    logits = torch.zeros(4, 256)
    logits[:, EOS] = 5.0
    rows = sampling(min_tokens=20, max_tokens=30).rows(10, tuple(spelt("abc")))
    tokens = Sampler(256, ReferenceBackend()).sample(logits, rows).tokens
    assert tokens[2] in spelt("cd")
    assert tokens[3] == EOS


def test_a_state_made_from_tokens_is_the_state_that_saw_them() -> None:
    assert ids(sampling(output=spelt("ab")).rows(0)[0].mask) == listed(spelt("ab"))
