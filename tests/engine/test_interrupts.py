"""Whatever interrupts a step, wherever it does: the step's requests end, and the engine goes on as if new."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.sampling import SamplingParams

PROMPTS = [[i, 2 * i, 3 * i, 7] * 6 for i in range(1, 5)]
PARAMS = SamplingParams(temperature=0, max_tokens=6)
METHODS = ("none", "ngram", "draft_model", "draft_model, chosen")
INTERRUPTED = ("scheduler", "kv", "engine", "runner")
"""Packages whose lines are interrupted one by one."""


class Interrupt(BaseException):
    pass


def engine_for(method: str, **settings: Any) -> Engine:
    model = tiny_model()
    if method.startswith("draft_model"):
        drafter = tiny_draft_model(model, first_layers(model, 1))
        k = None if method.endswith("chosen") else 3
        return tiny_engine(model, drafter=drafter, method="draft_model", k=k, **settings)
    return tiny_engine(model, speculate=method == "ngram", k=3, **settings)


def expected_for(method: str) -> list[list[int]]:
    return tokens_of(LLM.over(engine_for(method)).generate(PROMPTS, PARAMS))


def added(engine: Engine) -> list[RequestOutput]:
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{number}", prompt, PARAMS)
    return [engine.output(f"r{number}") for number in range(len(PROMPTS))]


def finish(engine: Engine, *, tolerated: type[BaseException] = Interrupt) -> int:
    """Step until no request is left; returns how often a step was interrupted."""
    interrupted = 0
    for _step in range(200):
        if not engine.has_work:
            return interrupted
        try:
            engine.step()
        except tolerated:
            interrupted += 1
    raise AssertionError("requests never end")


def assert_as_new(engine: Engine, expected: list[list[int]]) -> None:
    """Everything is computed as by a fresh engine, and no page is held."""
    assert tokens_of(LLM.over(engine).generate(PROMPTS, PARAMS)) == expected
    assert engine.sanitizer is not None
    assert not engine.sanitizer.violations
    engine.sanitizer.check_conservation()
    kv = engine.scheduler.kv
    kv.check_integrity()
    assert not engine.has_work
    assert not engine.runner.requests
    assert not engine.scheduler.requests
    assert not kv.sequences
    assert [arena.num_held for arena in kv.pool.arenas] == [0] * len(kv.pool.arenas)


def assert_right_or_failed(outputs: list[RequestOutput], expected: list[list[int]]) -> list[bool]:
    """Who got through is right, who did not says why. Returns who did not."""
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.finished
        if output.error is None:
            assert output.outputs[0].token_ids == tokens
        else:
            assert "interrupted" in output.error
            assert output.outputs[0].finish_reason == "error"
    return [output.error is not None for output in outputs]


def raising_once(original: Callable[..., Any], error: BaseException, *, call: int = 1, late: bool = False) -> Any:
    calls = 0

    def replaced(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not late:
            raise error
        result = original(*args, **options)
        if calls == call:
            raise error
        return result

    return replaced


PLACES: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "schedule": lambda engine: (engine.scheduler, "schedule"),
    "plan": lambda engine: (engine.scheduler.kv, "take_plan"),
    "run": lambda engine: (engine.runner, "run"),
    "tables": lambda engine: (engine.runner._tables, "assign"),
    "layers": lambda engine: (engine.runner._target, "forward"),
    "sample": lambda engine: (engine.runner, "_sample"),
    "propose": lambda engine: (engine.runner.drafting, "run"),
    "commit": lambda engine: (engine.scheduler, "commit"),
    "commit kv": lambda engine: (engine.scheduler.kv, "commit"),
    "publish": lambda engine: (engine.scheduler.kv.progress, "publish"),
    "hand out": lambda engine: (engine._delivery, "_take"),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_ends_the_step_it_came_in(
    method: str, place: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_for(method)
    for call in (1, 3):
        engine = engine_for(method, max_num_seqs=2)
        LLM.over(engine).generate(PROMPTS[:1], PARAMS)
        owner, name = PLACES[place](engine)
        outputs = added(engine)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, raising_once(getattr(owner, name), MemoryError("full"), call=call, late=late))
            assert finish(engine, tolerated=MemoryError) == 1
        failed = assert_right_or_failed(outputs, expected)
        # Two run at a time: the others were not in that step.
        assert sum(failed) <= 2
        assert_as_new(engine, expected)


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_may_be_interrupted_at_any_line(method: str, step: int) -> None:
    expected = expected_for(method)
    place, interrupted = 7, True
    while interrupted:
        engine = engine_for(method, max_num_seqs=3)
        LLM.over(engine).generate(PROMPTS[:1], PARAMS)
        outputs = added(engine)
        for _ in range(step - 1):
            engine.step()
        interrupted = _interrupt_at(engine.step, place)
        finish(engine)
        assert_right_or_failed(outputs, expected)
        assert_as_new(engine, expected)
        place += 149


def _interrupt_at(call: Callable[[], object], place: int) -> bool:
    """Make a call that is interrupted at the given number of lines; False if it has fewer."""
    seen = 0

    def enter(frame: FrameType, _event: str, _arg: Any) -> Any:
        package = frame.f_globals.get("__name__", "").split(".")
        ours = package[0] == "outrider" and len(package) > 1 and package[1] in INTERRUPTED
        # What cleans up after an interrupt is not interrupted again.
        return line if ours and frame.f_code.co_name not in ("guarded", "_abandon", "drop_all") else None

    def line(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal seen
        seen += event == "line"
        if seen == place:
            sys.settrace(None)
            raise Interrupt
        return line

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_request_may_be_interrupted_at_any_line_of_being_added() -> None:
    """Afterwards the engine knows all of it or nothing of it, and no other request is touched."""
    expected = expected_for("ngram")
    params = SamplingParams(n=2, temperature=0, max_tokens=6)
    place, interrupted = 1, True
    while interrupted:
        engine = engine_for("ngram")
        engine.add_request("a", PROMPTS[0], PARAMS)
        output = engine.output("a")
        interrupted = _interrupt_at(lambda engine=engine: engine.add_request("b", PROMPTS[1], params), place)  # type: ignore[misc]
        assert finish(engine) == 0
        assert output.outputs[0].token_ids == expected[0]
        if place % 10 == 1:
            assert_as_new(engine, expected)
        place += 3


def test_an_abort_may_be_interrupted_at_any_line() -> None:
    expected = expected_for("ngram")
    place, interrupted = 1, True
    while interrupted:
        engine = engine_for("ngram")
        engine.add_request("a", PROMPTS[0], PARAMS)
        engine.add_request("b", PROMPTS[1], SamplingParams(n=2, temperature=0, max_tokens=6))
        going_on, leaving = engine.output("a"), engine.output("b")
        engine.step()
        engine.step()
        interrupted = _interrupt_at(lambda engine=engine: engine.abort("b"), place)  # type: ignore[misc]
        assert finish(engine) == 0
        assert going_on.outputs[0].token_ids == expected[0]
        if interrupted and place > 1:
            assert [each.finish_reason for each in leaving.outputs] == ["abort"] * 2
        assert leaving.finished
        if place % 10 == 1:
            assert_as_new(engine, expected)
        place += 3


def test_a_request_that_ended_in_a_step_that_is_interrupted_later_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("none")
    engine.add_request("a", PROMPTS[0], SamplingParams(temperature=0, max_tokens=1))
    engine.add_request("b", PROMPTS[1], PARAMS)
    ended, lost = engine.output("a"), engine.output("b")
    with monkeypatch.context() as patched:
        patched.setattr(engine._delivery, "_take", raising_once(engine._delivery._take, Interrupt(), call=2))
        with pytest.raises(Interrupt):
            engine.step()
    assert not engine.has_work
    assert (ended.finished, ended.error, ended.outputs[0].finish_reason) == (True, None, "length")
    assert (lost.finished, lost.outputs[0].finish_reason) == (True, "error")
    assert_as_new(engine, expected_for("none"))


@pytest.mark.parametrize("stream", [False, True], ids=["generate", "stream"])
def test_a_call_that_is_interrupted_just_after_its_request_was_added_leaves_nothing_running(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for("none")
    llm = LLM.over(engine)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "add_request", raising_once(engine.add_request, Interrupt(), late=True))
        with pytest.raises(Interrupt):
            list(llm.stream(PROMPTS[0], PARAMS)) if stream else llm.generate(PROMPTS, PARAMS)
    assert_as_new(engine, expected_for("none"))


def test_a_signal_during_generate_leaves_the_llm_usable() -> None:
    engine = engine_for("ngram")
    llm = LLM.over(engine)
    expected = expected_for("ngram")

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        run, steps = engine.runner.run, 0

        def interrupted(plan: Any) -> Any:
            nonlocal steps
            steps += 1
            result = run(plan)
            if steps == 3:
                signal.raise_signal(signal.SIGALRM)
            return result

        engine.runner.run = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not engine.has_work
    assert_as_new(engine, expected)


def test_an_interrupted_abort_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_for("ngram")
    engine = engine_for("ngram")
    outputs = added(engine)
    engine.step()
    engine.step()
    with monkeypatch.context() as patched:
        kv = engine.scheduler.kv
        patched.setattr(kv.pool, "release", raising_once(kv.pool.release, Interrupt()))
        with pytest.raises(Interrupt):
            engine.abort_soon("r1")
    finish(engine)
    assert outputs[1].outputs[0].finish_reason == "abort"
    assert [output.outputs[0].token_ids for output in outputs[::2]] == expected[::2]
    assert_as_new(engine, expected)


def test_forks_end_with_the_request_that_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_for("draft_model")
    params = SamplingParams(n=3, seed=1, max_tokens=8)
    for call in (1, 2, 3):
        engine = engine_for("draft_model")
        engine.add_request("a", PROMPTS[0], params)
        output = engine.output("a")
        kv = engine.scheduler.kv
        with monkeypatch.context() as patched:
            patched.setattr(kv, "fork", raising_once(kv.fork, Interrupt(), call=min(call, 2), late=call > 2))
            assert finish(engine) == 1
        assert [each.finish_reason for each in output.outputs] == ["error"] * 3
        assert_as_new(engine, expected)


def test_a_request_that_cannot_be_entered_everywhere_is_entered_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("ngram")
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "add", raising_once(engine.runner.add, MemoryError("full")))
        with pytest.raises(MemoryError):
            engine.add_request("a", PROMPTS[0], PARAMS)
    assert not engine.has_work
    engine.add_request("a", PROMPTS[0], PARAMS)
    finish(engine)
    assert_as_new(engine, expected_for("ngram"))
