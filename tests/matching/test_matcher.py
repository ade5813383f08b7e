"""Masks of every position, against a grammar whose outputs are listed."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
import torch
from tests.matching.listed import EOS, ListedState, spelt, tiny_table

from outrider.grammar import Grammar, GrammarKind
from outrider.matching.grammars import Grammars
from outrider.matching.matcher import Matcher
from outrider.runner.sampler import RequestSampling, Sampler
from outrider.sampling import SamplingParams

OUTPUTS = ("abc", "abd", "ab", "b", "cccccc", "ccd", 'c"\\x', "cé")
CPU = torch.device("cpu")
VOCABULARY = 256


@cache
def grammars() -> Grammars:
    return Grammars(tiny_table(), device=CPU, limit_s=60)


def listed() -> tuple[Matcher, ListedState]:
    state = ListedState([output.encode() for output in OUTPUTS], tiny_table())
    return Matcher(state, vocab_size=VOCABULARY, device=CPU), state


def compiled() -> Matcher:
    grammar = Grammar(kind=GrammarKind.CHOICE, text=json.dumps(OUTPUTS))
    return grammars().matcher(grammars().compile(grammar).result())


def ids(mask: torch.Tensor | None) -> set[int] | None:
    return None if mask is None else set(mask.nonzero()[:, 0].tolist())


def letters(text: str, *, end: bool = False) -> set[int]:
    return set(spelt(text)) | ({EOS} if end else set())


@pytest.mark.parametrize("make", [lambda: listed()[0], compiled], ids=["listed", "compiled"])
def test_each_row_sees_the_drafts_before_it_and_no_others(make: object) -> None:
    matcher: Matcher = make()  # type: ignore[operator]
    drafts = [*spelt("abc"), EOS, *spelt("a")]
    after = [letters("abc"), letters("b"), letters("cd", end=True), {EOS}, None, None]
    assert [ids(mask) for mask in matcher.masks(drafts)] == after
    # Asking has changed nothing.
    assert [ids(mask) for mask in matcher.masks(drafts)] == after
    assert [ids(matcher.mask_after(drafts[:n])) for n in range(6)] == after
    assert matcher.count_allowed(drafts) == 4
    matcher.accept(spelt("a"))
    assert [ids(mask) for mask in matcher.masks(spelt("bx"))] == [letters("b"), letters("cd", end=True), None]
    assert matcher.count_allowed(spelt("bx")) == 1


def test_the_compiled_grammar_allows_what_is_listed_and_nothing_else() -> None:
    rng = random.Random(0)
    for _ in range(40):
        matcher, state = listed()
        native = compiled()
        while not state.is_terminated():
            drafts = [rng.choice([*spelt("abcdé"), EOS, 3]) for _ in range(rng.randrange(4))]
            assert [ids(mask) for mask in native.masks(drafts)] == [ids(mask) for mask in matcher.masks(drafts)]
            assert native.count_allowed(drafts) == matcher.count_allowed(drafts)
            token = rng.choice(sorted(state.allowed()))
            matcher.accept([token])
            native.accept([token])
        assert native.masks([]) == [None]


def test_forks_go_ways_of_their_own() -> None:
    matcher = compiled()
    matcher.accept(spelt("ab"))
    fork = matcher.fork()
    matcher.accept(spelt("c"))
    assert ids(fork.masks([])[0]) == letters("cd", end=True)
    assert ids(matcher.masks([])[0]) == {EOS}


def test_tokens_after_the_end_count_for_nothing() -> None:
    matcher = compiled()
    matcher.accept([*spelt("b"), EOS, 5, 6])
    assert matcher.masks([7]) == [None, None]
    assert matcher.count_allowed([7]) == 0


def sampling(matcher: Matcher, **settings: object) -> RequestSampling:
    params = SamplingParams(temperature=0, **settings)  # type: ignore[arg-type]
    return RequestSampling(params, vocab_size=VOCABULARY, device=CPU, eos_token_ids=[EOS], matcher=matcher)


def test_sampling_obeys_the_mask_of_each_row() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 3] = 9.0  # what the model would rather say is nowhere allowed
    logits[:, EOS] = 5.0
    rows = sampling(compiled()).rows(10, tuple(spelt("abc")))
    assert [row.position for row in rows] == [10, 11, 12, 13]
    tokens = Sampler(VOCABULARY, CPU).sample(logits, rows).tokens
    assert tokens[0] in letters("abc")
    assert tokens[1:] == [*spelt("b"), EOS, EOS]


def test_a_least_length_holds_until_the_form_leaves_no_other_way() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[:, EOS] = 5.0
    rows = sampling(compiled(), min_tokens=20, max_tokens=30).rows(10, tuple(spelt("abc")))
    tokens = Sampler(VOCABULARY, CPU).sample(logits, rows).tokens
    assert tokens[2] in letters("cd")
    assert tokens[3] == EOS


def test_a_state_made_from_tokens_is_the_state_that_saw_them() -> None:
    params = SamplingParams(temperature=0)
    resumed = RequestSampling(
        params, vocab_size=VOCABULARY, device=CPU, eos_token_ids=[EOS], matcher=compiled(), output=spelt("ab")
    )
    assert ids(resumed.rows(0)[0].mask) == letters("cd", end=True)
