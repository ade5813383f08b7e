"""Many callers at once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

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


async def last(llm: AsyncLLM, prompt: Any, params: Any = PARAMS, **options: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params, **options)][-1]


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


def test_an_abort_ends_no_request_that_is_called_like_a_fork() -> None:
    prompt, long = [1, 2, 3], SamplingParams(n=2, seed=1, max_tokens=60)
    first, fork = (each.token_ids for each in LLM.over(tiny_engine()).generate([prompt], long)[0].outputs)
    # A token that ends the fork early, and the first continuation never.
    stop = next(token for token in fork if token not in first)

    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(tiny_engine())) as llm:
            params = replace(long, stop_token_ids=[stop])
            stream = llm.generate(prompt, params, request_id="a")
            async for output in stream:
                if output.outputs[1].finish_reason is not None:
                    break
            other = asyncio.create_task(last(llm, [4, 5], request_id="a#1"))
            await asyncio.sleep(0)
            await stream.aclose()  # type: ignore[attr-defined]
            assert len((await other).outputs[0].token_ids) == 25

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("prompt", "params", "options"),
    [
        ([], PARAMS, {}),
        ([999], PARAMS, {}),
        (None, PARAMS, {}),
        (object(), PARAMS, {}),
        ([1, 2], {"temperature": 0}, {}),
        ([1, 2], PARAMS, {"request_id": ["a"]}),
    ],
)
def test_a_bad_request_fails_alone(prompt: Any, params: Any, options: Any) -> None:
    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(tiny_engine())) as llm:
            good = asyncio.create_task(last(llm, [1, 2, 3]))
            with pytest.raises(RequestError):
                await asyncio.wait_for(last(llm, prompt, params, **options), 30)
            assert len((await good).outputs[0].token_ids) == 25

    asyncio.run(run())


def test_an_unexpected_error_reaches_the_caller_that_it_came_from(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()
    add = engine.add_request

    def broken(request_id: str, *args: Any, **options: Any) -> None:
        if request_id == "bad":
            raise ArithmeticError("unexpected")
        add(request_id, *args, **options)

    engine.add_request = broken  # type: ignore[method-assign]

    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(engine)) as llm:
            good = asyncio.create_task(last(llm, [1, 2, 3]))
            with pytest.raises(ArithmeticError):
                await asyncio.wait_for(last(llm, [1, 2], request_id="bad"), 30)
            assert len((await good).outputs[0].token_ids) == 25

    asyncio.run(run())
    assert "unexpected" in caplog.text


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


@pytest.mark.parametrize("error", [ArithmeticError("on fire"), SystemExit("on fire")], ids=repr)
def test_all_are_told_when_the_engine_stops_and_cannot_even_abort(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine()

    def broken(*_args: object) -> None:
        raise error

    engine.runner.run = engine.abort = broken  # type: ignore[method-assign, assignment]

    async def run() -> None:
        llm = AsyncLLM(llm=LLM.over(engine))
        callers = asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS[:4]), return_exceptions=True)
        assert all("on fire" in str(result) for result in await asyncio.wait_for(callers, 30))
        with pytest.raises((ArithmeticError, RuntimeError), match="on fire"):
            await last(llm, [1])

    asyncio.run(run())
    assert "on fire" in caplog.text


def test_all_are_told_when_the_engine_stops_while_a_caller_leaves(caplog: pytest.LogCaptureFixture) -> None:
    """The abort of the caller that leaves is still in the queue when the step fails, and it fails too."""
    engine = tiny_engine()
    running, left = threading.Event(), threading.Event()

    def broken(*_args: object) -> None:
        running.set()
        left.wait(30)
        raise ArithmeticError("on fire")

    engine.runner.run = engine.abort = broken  # type: ignore[method-assign, assignment]

    async def run() -> None:
        llm = AsyncLLM(llm=LLM.over(engine))
        leaving = asyncio.create_task(last(llm, [1, 2]))
        staying = asyncio.create_task(last(llm, [3, 4]))
        await asyncio.to_thread(running.wait, 30)
        leaving.cancel()
        await asyncio.wait([leaving])
        left.set()
        with pytest.raises(ArithmeticError, match="on fire"):
            await asyncio.wait_for(staying, 30)

    asyncio.run(run())
    assert "on fire" in caplog.text


def test_a_stream_that_is_left_when_the_engine_has_closed_ends_quietly() -> None:
    async def run() -> None:
        llm = AsyncLLM(llm=LLM.over(tiny_engine()))
        stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=200, seed=1))
        async for _output in stream:
            break
        await asyncio.to_thread(llm.close)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_a_bad_id_whose_caller_leaves_at_once_affects_no_other() -> None:
    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(tiny_engine())) as llm:
            bad: Any = ["a"]
            leaving = asyncio.create_task(last(llm, [1, 2], request_id=bad))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
            assert len((await last(llm, [4, 5])).outputs[0].token_ids) == 25

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_result_that_cannot_be_handed_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_output: object) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr("outrider.api.async_llm._snapshot", broken)

    async def run() -> None:
        llm = AsyncLLM(llm=LLM.over(tiny_engine()))
        one = SamplingParams(temperature=0, max_tokens=1)
        callers = asyncio.gather(*(last(llm, [number, 7], one) for number in range(3)), return_exceptions=True)
        assert all(isinstance(result, MemoryError) for result in await asyncio.wait_for(callers, 30))

    asyncio.run(run())


def test_a_caller_whose_id_is_taken_does_not_end_the_other() -> None:
    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(tiny_engine())) as llm:
            long = SamplingParams(temperature=0, max_tokens=200)
            first = llm.generate([1, 2, 3], long, request_id="a")
            async for _output in first:
                break
            second = asyncio.create_task(last(llm, [4, 5], request_id="a"))
            await asyncio.sleep(0)
            second.cancel()
            async for output in first:
                ended = output.outputs[0].finish_reason
            assert ended == "length"

    asyncio.run(asyncio.wait_for(run(), 60))
