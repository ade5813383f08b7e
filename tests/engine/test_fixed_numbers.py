"""Beside requests for which the engine chooses, a request may say how many tokens are drafted for it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.pacing import choose_at_random
from tests.engine.tiny import tiny_draft_model, tiny_engine, tiny_model

from outrider.engine.engine import Engine
from outrider.errors import RequestError
from outrider.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPT = [5, 6, 7, 8]
MOST = 4


def choosing() -> Engine:
    """The target drafts for itself, so that every draft is accepted."""
    model = tiny_model()
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), method="draft_model", k=None)
    assert engine.k == MOST
    return engine


def run_beside_others(engine: Engine, **options: Any) -> tuple[list[int], list[int]]:
    """Returns the text of a request beside two whose drafts are chosen, and the tokens that each of its steps gave."""
    engine.add_request("a", [9, 1], GREEDY)
    engine.add_request("r", PROMPT, GREEDY, **options)
    engine.add_request("b", [3], GREEDY)
    output, given = engine.output("r"), []
    others = [engine.output(name) for name in "ab"]
    while engine.has_work:
        before = len(output.outputs[0].token_ids)
        engine.step()
        given.append(len(output.outputs[0].token_ids) - before)
    assert [other.error for other in others] == [None, None]
    return tokens_of([output])[0], [tokens for tokens in given if tokens]


@pytest.mark.parametrize("number", range(MOST + 1))
def test_so_many_drafts_are_verified_at_every_step(number: int) -> None:
    (plain,) = tokens_of(generate(tiny_engine(tiny_model())))
    engine = choosing()
    choose_at_random(engine)
    text, given = run_beside_others(engine, num_speculative_tokens=number)
    assert text == plain
    # The first token comes from the prompt, and the last step has no room for more.
    assert set(given[1:-1]) == {1 + number}


def test_a_request_that_does_not_speculate_has_no_drafts() -> None:
    engine = choosing()
    choose_at_random(engine)
    _text, given = run_beside_others(engine, speculate=False)
    assert set(given) == {1}


def test_an_engine_with_a_fixed_number_drafts_fewer_for_a_request_that_says_so() -> None:
    model = tiny_model()
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), method="draft_model", k=MOST)
    assert engine.pacer is None
    _text, given = run_beside_others(engine, num_speculative_tokens=2)
    assert set(given[1:-1]) == {3}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (MOST + 1, f"is {MOST + 1}, but this engine drafts at most {MOST} tokens"),
        (-1, "num_speculative_tokens must be a whole number of at least 0"),
        (True, "num_speculative_tokens must be a whole number"),
        (2.0, "num_speculative_tokens must be a whole number"),
        ("3", "num_speculative_tokens must be a whole number"),
    ],
)
def test_a_number_that_cannot_be_is_refused(wanted: Any, words: str) -> None:
    engine = choosing()
    with pytest.raises(RequestError, match=f"request 'r': .*{words}"):
        engine.add_request("r", PROMPT, GREEDY, num_speculative_tokens=wanted)
    assert not engine.has_work
    assert engine.scheduler.requests == {}
    # The id is free.
    engine.add_request("r", PROMPT, GREEDY, num_speculative_tokens=MOST)


def test_without_a_drafter_only_none_can_be_asked_for() -> None:
    engine = tiny_engine(tiny_model())
    with pytest.raises(RequestError, match="num_speculative_tokens is 2, but this engine has no drafter; leave it out"):
        engine.add_request("r", PROMPT, GREEDY, num_speculative_tokens=2)
    assert generate(engine, num_speculative_tokens=0)[0].error is None


def generate(engine: Engine, **options: Any) -> list[Any]:
    engine.add_request("r", PROMPT, GREEDY, **options)
    output = engine.output("r")
    while engine.has_work:
        engine.step()
    return [output]
