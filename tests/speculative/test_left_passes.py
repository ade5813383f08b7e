"""What a step leaves to the threads of the backend: who waits for it, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.speculative.cases import CASES, engine_with, prompts, three_layers

from outrider.api.llm import LLM
from outrider.backends.cpu.backend import CPUBackend
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams


def drafting_engine(directory: Path, name: str = "full", **settings: object) -> tuple[Engine, CPUBackend]:
    """An engine that feeds its drafter and proposes nothing, so that every step leaves its feed."""
    backend = CPUBackend(2)
    engine, _recorder = engine_with(
        CASES[name], three_layers(), directory, drafter_backend=backend, backend="cpu", num_threads=2, **settings
    )
    return engine, backend


def add_all(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, params, speculate=False)


def leaves_something(engine: Engine, backend: CPUBackend) -> bool:
    return any(
        each.replays.begun is not None for each in (engine.runner.backend, backend) if isinstance(each, CPUBackend)
    )


def test_a_feed_runs_while_the_next_step_is_prepared_and_none_is_left_at_the_end(tmp_path: Path) -> None:
    engine, backend = drafting_engine(tmp_path, sanitizer="off")
    add_all(engine)
    left = []
    while engine.has_work:
        engine.step()
        left.append(leaves_something(engine, backend))
    assert any(left)
    assert not left[-1]


def test_an_abort_of_the_last_request_waits_for_what_its_step_left(tmp_path: Path) -> None:
    engine, backend = drafting_engine(tmp_path, sanitizer="off")
    add_all(engine)
    while not leaves_something(engine, backend):
        engine.step()
    for number in range(len(prompts())):
        engine.abort(str(number))
    assert not leaves_something(engine, backend)


def test_a_stream_that_is_closed_waits_for_what_its_step_left(tmp_path: Path) -> None:
    engine, backend = drafting_engine(tmp_path, sanitizer="off")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    stream = LLM.over(engine).stream(prompts()[0], params, speculate=False)
    for _output in stream:
        if leaves_something(engine, backend):
            break
    assert leaves_something(engine, backend)
    stream.close()
    assert not leaves_something(engine, backend)


def test_a_step_that_fails_waits_for_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that it writes are free afterwards, and may be another's next."""
    engine, backend = drafting_engine(tmp_path, sanitizer="off")
    add_all(engine)
    while not leaves_something(engine, backend):
        engine.step()

    def fail(*_arguments: object) -> None:
        assert leaves_something(engine, backend)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, "commit", fail)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not leaves_something(engine, backend)


@pytest.mark.parametrize("name", ["full", "eagle3", "mtp, qwen"])
def test_pages_that_others_read_are_complete_when_a_step_returns(name: str, tmp_path: Path) -> None:
    engine, backend = drafting_engine(tmp_path, name, sanitizer="off")
    engine.runner.store.memory_map()
    add_all(engine)
    while engine.has_work:
        engine.step()
        assert not leaves_something(engine, backend)
