"""A request says how many tokens are drafted for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_draft_model, tiny_engine, tiny_model

from outrider.api.async_llm import AsyncLLM
from outrider.api.llm import LLM
from outrider.engine.outputs import RequestOutput
from outrider.errors import RequestError
from outrider.sampling import SamplingParams

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def drafting() -> LLM:
    """The target drafts for itself, so that every draft is accepted; at most four of them at each step."""
    model = tiny_model()
    return LLM.over(tiny_engine(model, drafter=tiny_draft_model(model, model)))


def most_accepted(output: RequestOutput) -> int:
    return len(output.metrics.speculation.accepted_at)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 4),
        ({"num_speculative_tokens": 2}, 2),
        ({"num_speculative_tokens": 4, "speculate": True}, 4),
        ({"num_speculative_tokens": 0}, 0),
        ({"speculate": False}, 0),
        ({"speculate": False, "num_speculative_tokens": 0}, 0),
    ],
)
def test_a_request_has_as_many_drafts_as_it_asks_for(options: dict[str, Any], most: int) -> None:
    plain = LLM.over(tiny_engine(tiny_model())).generate(PROMPT, GREEDY)
    llm = drafting()
    (whole,) = llm.generate(PROMPT, GREEDY, **options)
    *_, streamed = llm.stream(PROMPT, GREEDY, **options)

    async def ask() -> RequestOutput:
        async with AsyncLLM(llm=drafting()) as other:
            return [output async for output in other.generate(PROMPT, GREEDY, **options)][-1]

    for output in (whole, streamed, asyncio.run(ask())):
        assert most_accepted(output) == most
        assert tokens_of([output]) == tokens_of(plain)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 5}, "at most 4 tokens per step; ask for that many or fewer"),
        ({"num_speculative_tokens": -1}, "at least 0"),
        ({"num_speculative_tokens": True}, "at least 0"),
        ({"num_speculative_tokens": 3, "speculate": False}, "leave one of them out"),
    ],
)
def test_a_number_of_drafts_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    llm = drafting()
    with pytest.raises(RequestError, match=words):
        llm.generate(PROMPT, GREEDY, **options)
    assert not llm.engine.has_work


def test_without_a_drafter_only_no_drafts_can_be_asked_for() -> None:
    llm = LLM.over(tiny_engine())
    with pytest.raises(RequestError, match="no drafter"):
        llm.generate(PROMPT, GREEDY, num_speculative_tokens=1)
    (output,) = llm.generate(PROMPT, GREEDY, num_speculative_tokens=0)
    assert output.finished
