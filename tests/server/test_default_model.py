"""The real default model with its drafter behind HTTP: the same text as offline, whoever else is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from tests.server.running import RunningServer

from outrider import LLM, SamplingParams
from outrider.models.resolve import DEFAULT_MODEL

STREAMS, TOKENS = 64, 10
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
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    speculation = answer.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert speculation["drafts"] > 0
    assert speculation["acceptance_length"] == pytest.approx(1 + speculation["accepted_tokens"] / speculation["drafts"])
