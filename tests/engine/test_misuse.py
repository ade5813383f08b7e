"""What callers get wrong is theirs alone, and they are told what to do instead."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine

from outrider.api.async_llm import AsyncLLM
from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.errors import BusyError, OutriderError, RequestError
from outrider.sampling import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.over(tiny_engine())


# ---- prompts and settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts", [None, 7, iter([[1]]), 1.5, object(), {1, 2}, b"text"], ids=lambda value: type(value).__name__
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt is text, a list of token ids"):
        llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("prompts", [[1.5, 2.0], np.array([1.5, 2.0]), [np.float32(1)]], ids=repr)
def test_numbers_that_are_no_token_ids_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"token ids"):
        llm.generate(prompts, PARAMS)


def test_whole_numbers_of_numpy_are_token_ids(llm: LLM) -> None:
    expected = tokens_of(llm.generate([[1, 2, 3], [4, 5, 6]], PARAMS))
    both = np.array([[1, 2, 3], [4, 5, 6]])
    given: list[Any] = [both, list(both), [{"prompt_token_ids": row} for row in both.astype(np.uint8)]]
    for prompts in given:
        assert tokens_of(llm.generate(prompts, PARAMS)) == expected
    for prompt in (both[0], list(both[0])):
        assert tokens_of(llm.generate(prompt, PARAMS)) == expected[:1]


@pytest.mark.parametrize("params", ["x", {}, {"temperature": 0}, [None], [PARAMS, "x"], 3, b"x"], ids=repr)
def test_settings_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[1, 2]] * (len(params) if isinstance(params, list) else 1), params)
    with pytest.raises(RequestError, match="SamplingParams"):
        next(llm.stream([1, 2], params))
    assert not llm.engine.has_work


@pytest.mark.parametrize("name", [None, 7, ["a"], b"a"], ids=repr)
def test_ids_of_another_type_are_refused(llm: LLM, name: Any) -> None:
    with pytest.raises(RequestError, match="id must be a string"):
        llm.engine.add_request(name, [1, 2], PARAMS)


@pytest.mark.parametrize("messages", [None, 7, "hello", {"role": "user"}], ids=repr)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat(messages)


# ---- calls that end early --------------------------------------------------------------------------------


def test_a_call_that_is_broken_off_leaves_nothing_running(llm: LLM) -> None:
    def stop(_changed: object) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        llm.generate([[1, 2], [3, 4]], PARAMS, on_step=stop)
    assert not llm.engine.has_work
    assert not llm.engine.runner.requests


def test_a_stream_gets_its_end_when_another_call_runs_it(llm: LLM) -> None:
    (expected,) = tokens_of(llm.generate([1, 2, 3], PARAMS))
    stream = llm.stream([1, 2, 3], PARAMS)
    assert len(next(stream).outputs[0].token_ids) == 1
    llm.generate([4, 5, 6], SamplingParams(temperature=0, max_tokens=40))
    (rest,) = list(stream)
    assert rest.finished
    assert rest.outputs[0].token_ids == expected
    assert [output.finished for output in llm.stream([1, 2, 3], PARAMS)] == [False] * 11 + [True]


# ---- threads ---------------------------------------------------------------------------------------------


def inside(engine: Engine, call: Any) -> BaseException | None:
    """What a call from another thread raises while a step is running."""
    raised: list[BaseException | None] = []
    run = engine.runner.run

    def attempt() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    def meanwhile(plan: Any) -> Any:
        engine.runner.run = run  # type: ignore[method-assign]
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return run(plan)

    engine.runner.run = meanwhile  # type: ignore[method-assign]
    engine.step()
    return raised[0]


def test_a_second_thread_is_refused_and_changes_nothing() -> None:
    engine = tiny_engine()
    (expected,) = tokens_of(LLM.over(tiny_engine()).generate([1, 2, 3], PARAMS))
    engine.add_request("a", [1, 2, 3], PARAMS)
    output = engine.output("a")
    calls: list[Any] = [
        engine.step,
        lambda: engine.abort("a"),
        lambda: engine.add_request("b", [4, 5], PARAMS),
        lambda: LLM.over(engine).generate([4, 5], PARAMS),
    ]
    for call in calls:
        error = inside(engine, call)
        assert isinstance(error, BusyError)
        assert isinstance(error, OutriderError)
        assert "AsyncLLM" in str(error)
        assert "one LLM for each thread" in str(error)
    while engine.has_work:
        engine.step()
    assert output.outputs[0].token_ids == expected


def test_whoever_leaves_during_a_step_is_gone_before_the_next() -> None:
    engine = tiny_engine()
    engine.add_request("a", [1, 2, 3], PARAMS)
    engine.add_request("b", [4, 5, 6], PARAMS)
    leaving = engine.output("b")
    assert inside(engine, lambda: engine.leave("b")) is None
    engine.step()
    assert leaving.outputs[0].finish_reason == "abort"
    assert set(engine.runner.requests) == {"a"}


# ---- many callers ----------------------------------------------------------------------------------------


async def last(llm: AsyncLLM, prompt: Any, params: Any = PARAMS, **options: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params, **options)][-1]


@pytest.mark.parametrize(
    ("prompt", "params", "options"),
    [
        ([1, 2], {"temperature": 0}, {}),
        ([1, 2], {}, {}),
        ([1, 2], PARAMS, {"request_id": ["a"]}),
        ([1, 2], PARAMS, {"request_id": 7}),
        (None, PARAMS, {}),
        (object(), PARAMS, {}),
    ],
)
def test_a_caller_with_a_wrong_type_fails_alone(prompt: Any, params: Any, options: Any) -> None:
    async def run() -> None:
        async with AsyncLLM(llm=LLM.over(tiny_engine())) as llm:
            good = asyncio.create_task(last(llm, [1, 2, 3]))
            with pytest.raises(RequestError):
                await asyncio.wait_for(last(llm, prompt, params, **options), 30)
            assert len((await good).outputs[0].token_ids) == 12

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
            assert len((await good).outputs[0].token_ids) == 12

    asyncio.run(run())
    assert "unexpected" in caplog.text


@pytest.mark.parametrize("error", [ArithmeticError("on fire"), SystemExit("on fire")], ids=repr)
def test_all_are_told_when_the_engine_stops_and_cannot_even_abort(error: BaseException) -> None:
    engine = tiny_engine()

    def broken(*_args: object) -> None:
        raise error

    engine.runner.run = engine.abort = broken  # type: ignore[method-assign, assignment]

    async def run() -> None:
        llm = AsyncLLM(llm=LLM.over(engine))
        callers = asyncio.gather(*(last(llm, [number, 7]) for number in range(4)), return_exceptions=True)
        assert all("on fire" in str(result) for result in await asyncio.wait_for(callers, 30))

    asyncio.run(run())


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
