"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest
from tests.cli.cli import Done, Outrider, run_main, use_tiny_model


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Outrider:
    """Runs `outrider ARGUMENTS` in this process."""

    def run(*arguments: object, stdin: str = "") -> Done:
        return run_main(monkeypatch, capsys, arguments, stdin)

    return run


@pytest.fixture
def tiny(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> Outrider:
    """The same over a tiny model."""
    use_tiny_model(monkeypatch)
    return lambda *arguments, stdin="": outrider(*arguments, "--backend", "reference", stdin=stdin)
