"""The real default model with its drafter behind HTTP: the same text as offline, whoever else is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.running import RunningServer

from outrider import LLM, SamplingParams
from outrider.models.resolve import DEFAULT_MODEL

STREAMS, TOKENS = 64, 10
DRAFTED = {"num_speculative_tokens": 4}
"""Whether the engine itself would draft depends on the machine."""
SUBJECTS = ("bridges", "bread", "snow", "eels", "trains", "chisels", "fountains", "museums")
PROMPTS = [f"{number}. A few words about {SUBJECTS[number % len(SUBJECTS)]}:" for number in range(STREAMS)]


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    server = RunningServer(DEFAULT_MODEL, "--kv-cache-memory-bytes", "256M", "--sanitizer", "raise")
    try:
        yield server.wait()
        assert "broken at step" not in server.log
        assert "Traceback" not in server.log, server.log
    finally:
        assert server.stop() == 0, server.log


def params(number: int) -> SamplingParams:
    temperature = (0.0, 0.8)[number % 2]
    return SamplingParams(temperature=temperature, seed=number, max_tokens=TOKENS)


async def streamed(client: openai.AsyncOpenAI, number: int) -> str:
    wanted = params(number)
    stream = await client.completions.create(
        model=DEFAULT_MODEL,
        prompt=PROMPTS[number],
        temperature=wanted.temperature,
        seed=wanted.seed,
        max_tokens=wanted.max_tokens,
        stream=True,
        extra_body=DRAFTED if number % 4 < 2 else {},
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_many_streams_with_speculation_equal_plain_offline_text(served: RunningServer) -> None:
    offline = LLM(kv_cache_memory_bytes=256 << 20).generate(PROMPTS, [params(n) for n in range(STREAMS)])

    async def all_at_once() -> list[str]:
        async with served.async_openai() as client:
            return await asyncio.gather(*(streamed(client, number) for number in range(STREAMS)))

    assert asyncio.run(all_at_once()) == [output.outputs[0].text for output in offline]
    metrics = served.http().get("/metrics").text
    drafted = next(line for line in metrics.splitlines() if line.startswith("outrider:spec_decode_num_draft_tokens"))
    assert float(drafted.rsplit(" ", 1)[1]) > STREAMS


def test_an_answer_makes_sense_and_says_how_speculation_did(served: RunningServer) -> None:
    answer = served.openai().chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        extra_body=DRAFTED,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    speculation = answer.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert speculation["drafts"] > 0
    assert speculation["acceptance_length"] == pytest.approx(1 + speculation["accepted_tokens"] / speculation["drafts"])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def test_the_result_of_a_tool_finds_its_way_into_the_answer(served: RunningServer) -> None:
    """The model is too small to call by itself, but it reads what a call gave."""
    client = served.openai()
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    options: dict[str, Any] = {"model": DEFAULT_MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 40}
    first = client.chat.completions.create(messages=asked, **options).choices[0].message
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town": "Oslo"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 4, "sky": "rain"}'}
    messages = [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    answer = client.chat.completions.create(messages=messages, **options).choices[0].message
    assert "rain" in (answer.content or "")
    assert "rain" not in (first.content or "")
