"""What a person, or a log, sees while a model is loaded."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.backends import COMPILING
from outrider.backends.cpu.kernels.compiling import LOADING
from outrider.cli import terminal


@pytest.fixture(params=[True, False], ids=["terminal", "log"])
def watched(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def shown(watched: bool, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    monkeypatch.setattr(terminal, "errors", Console(file=text, force_terminal=watched, width=80))
    return text


def load(*reports: str) -> None:
    with terminal.loading() as progress:
        for done, what in enumerate(reports):
            progress(what, done, len(reports))


def test_compiling_is_said_once(shown: io.StringIO, watched: bool) -> None:
    load("loading weights", LOADING, COMPILING, COMPILING)
    assert "compiling kernels (once)" in shown.getvalue()
    if not watched:
        assert shown.getvalue() == "compiling kernels (once); later starts read them from disk\n"


def test_a_later_start_says_nothing_of_it(shown: io.StringIO, watched: bool) -> None:
    load("loading weights", LOADING, LOADING)
    assert "compiling" not in shown.getvalue()
    if not watched:
        assert shown.getvalue() == ""
