"""Many callers at once."""

from __future__ import annotations

import asyncio

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine

from outrider.api.async_llm import AsyncLLM
from outrider.api.llm import LLM
from outrider.engine.outputs import RequestOutput
from outrider.errors import RequestError
from outrider.sampling import SamplingParams

PROMPTS = [[i, 2 * i, 3 * i, 7] for i in range(1, 12)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=25)


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams = PARAMS) -> RequestOutput:
    return [output async for output in llm.generate({"prompt_token_ids": prompt}, params)][-1]


def test_callers_get_what_they_would_get_alone() -> None:
    expected = tokens_of(LLM.over(tiny_engine()).generate(PROMPTS, PARAMS))

    async def run() -> list[list[int]]:
        async with AsyncLLM(llm=LLM.over(tiny_engine(speculate=True))) as llm:
            outputs = await asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS))
        return tokens_of(outputs)

    assert asyncio.run(run()) == expected


def test_results_that_were_handed_out_stay_as_they_are() -> None:
    async def run() -> list[int]:
        async with AsyncLLM(llm=LLM.over(tiny_engine())) as llm:
            seen = [output async for output in llm.generate([1, 2, 3], PARAMS)]
        return [len(output.outputs[0].token_ids) for output in seen]

    assert asyncio.run(run()) == list(range(1, 26))


def test_a_caller_who_leaves_frees_its_request() -> None:
    engine = tiny_engine()

    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(engine)) as llm:
            stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=200, seed=1))
            async for _output in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            assert len((await last(llm, [4, 5])).outputs[0].token_ids) == 25

    asyncio.run(run())
    assert not engine.has_work
    assert not engine.runner.requests


def test_a_bad_request_fails_alone() -> None:
    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(tiny_engine())) as llm:
            good = asyncio.create_task(last(llm, [1, 2, 3]))
            with pytest.raises(RequestError, match="empty"):
                await last(llm, [])
            with pytest.raises(RequestError, match="token id 999"):
                await last(llm, [999])
            assert len((await good).outputs[0].token_ids) == 25

    asyncio.run(run())


def test_closing_ends_those_who_wait() -> None:
    async def run() -> None:
        llm = AsyncLLM(llm=LLM.over(tiny_engine()))
        task = asyncio.create_task(last(llm, [1, 2, 3], SamplingParams(max_tokens=250, seed=1)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.close)
        with pytest.raises(RequestError, match="closed"):
            await task
        with pytest.raises(RequestError, match="closed"):
            await last(llm, [1])

    asyncio.run(run())


def test_an_engine_that_breaks_tells_every_caller(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()

    def broken(_plan: object) -> None:
        raise ArithmeticError("the device is on fire")

    engine.runner.run = broken  # type: ignore[method-assign, assignment]

    async def run() -> None:
        llm = AsyncLLM(llm=LLM.over(engine))
        results = await asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS[:3]), return_exceptions=True)
        assert all(isinstance(result, ArithmeticError) for result in results)
        with pytest.raises(ArithmeticError):
            await last(llm, [1])

    asyncio.run(run())
    assert "on fire" in caplog.text
