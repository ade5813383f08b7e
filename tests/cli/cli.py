"""The command line in this process, over a tiny model."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
from tests.engine.tiny import tiny_model

from outrider.cli.app import run
from outrider.config import EngineConfig
from outrider.engine import build
from outrider.engine.engine import Engine
from outrider.models.chat import ChatTemplate
from outrider.models.load import LoadedModel

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Done(NamedTuple):
    status: int
    out: str
    err: str


Outrider = Callable[..., Done]


@cache
def chat_model() -> LoadedModel:
    return replace(tiny_model(), chat_template=ChatTemplate(TEMPLATE, source="tiny"))


def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Any, stdin: str) -> Done:
    monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    capsys.readouterr()
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    out, err = capsys.readouterr()
    return Done(status, out, err)


def use_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever model a command asks for, it gets the tiny one."""
    real = build.build_engine

    def build_tiny(config: EngineConfig, **given: Any) -> Engine:
        return real(config, **(given | {"model": chat_model()}))

    # It is nobody's target.
    monkeypatch.setattr("outrider.cli.drafter_options.packaged_speculations", lambda model: [])
    modules = (
        "outrider.engine.build",
        "outrider.api.llm",
        "outrider.tools.bench.decode",
        "outrider.tools.bench.speedup",
    )
    # All of them first: one that is imported later would take the tiny one for the real one, and keep it.
    for module in modules:
        __import__(module)
    for module in modules:
        monkeypatch.setattr(f"{module}.build_engine", build_tiny)
