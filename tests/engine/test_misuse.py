"""What callers get wrong is theirs alone, and they are told what to do instead."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
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


def test_calls_of_two_llms_over_one_engine_do_not_meet(llm: LLM) -> None:
    (expected,) = tokens_of(llm.generate([1, 2, 3], PARAMS))
    stream = LLM.over(llm.engine).stream([1, 2, 3], PARAMS)
    first = next(stream)
    other = LLM.over(llm.engine).generate([4, 5, 6], PARAMS)[0]
    assert other.request_id != first.request_id
    assert tokens_of([list(stream)[-1]]) == [expected]


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


def test_a_request_that_is_aborted_during_a_step_is_gone_before_the_next() -> None:
    engine = tiny_engine()
    engine.add_request("a", [1, 2, 3], PARAMS)
    engine.add_request("b", [4, 5, 6], PARAMS)
    leaving = engine.output("b")
    assert inside(engine, lambda: engine.abort_soon("b")) is None
    engine.step()
    assert leaving.outputs[0].finish_reason == "abort"
    assert not engine.output("a").finished
    assert len(engine.runner.requests) == 1


def test_the_id_of_a_request_that_is_to_be_aborted_may_be_used_again() -> None:
    engine = tiny_engine()
    engine.add_request("a", [1, 2, 3], PARAMS)
    leaving = engine.output("a")
    assert inside(engine, lambda: engine.abort_soon("a")) is None
    engine.add_request("a", [4, 5, 6], PARAMS)
    assert leaving.outputs[0].finish_reason == "abort"
    output = engine.output("a")
    while engine.has_work:
        engine.step()
    assert tokens_of([output]) == tokens_of(LLM.over(tiny_engine()).generate([4, 5, 6], PARAMS))
