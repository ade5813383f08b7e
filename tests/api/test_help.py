"""Help texts as a terminal of 80 columns shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from outrider.api.cli.main import app


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("path", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_help_is_whole(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    assert not re.findall(r"--[a-z-]+…", done.output), "an option's name is cut off"
    assert not re.findall(r"\w- \w", done.output), "a word is divided in the middle of a line"
