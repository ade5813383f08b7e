"""A failure is one file that repeats the run exactly and can be made small."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import TraceError
from outrider.tools.sim.drawing import draw
from outrider.tools.sim.replay import Trace, record, replay, shrink

BUG = "copy_on_write_skipped"


@pytest.fixture(scope="module")
def failing() -> Trace:
    for index in range(100):
        result, trace = record(draw(1, index), BUG)
        if result.failure is not None:
            return trace
    raise AssertionError("no scenario noticed the bug")


def test_a_trace_file_repeats_the_run_exactly(failing: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    failing.write(path)
    read = Trace.read(path)
    assert read == failing
    result, exact = replay(read)
    assert exact
    assert result.failure == failing.failure


def test_a_replay_that_differs_is_told(failing: Trace) -> None:
    _result, exact = replay(Trace(failing.scenario, failing.mutation, failing.failure, "another digest"))
    assert not exact
    _result, exact = replay(Trace(failing.scenario, None, failing.failure, failing.digest))
    assert not exact


def test_the_shrinker_keeps_the_failure_and_drops_the_rest(failing: Trace) -> None:
    small = shrink(failing)
    assert small.failure is not None
    assert failing.failure is not None
    assert small.failure.invariant == failing.failure.invariant
    assert len(small.scenario.requests) < len(failing.scenario.requests)
    assert replay(small)[1]


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"format": 99, "scenario": {}}',
        '{"format": 1, "scenario": {"unknown_field": 3}}',
        '{"format": 1, "scenario": {"seed": 1}}',
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_a_reason(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TraceError):
        Trace.read(path)
