"""Help texts as a terminal of 80 columns shows them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import click
import pytest
import typer
from tests.cli.cli import Outrider
from typer.testing import CliRunner

from outrider.cli.app import app


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ROOT = typer.main.get_command(app)
PATHS = list(commands(ROOT))


def page(path: tuple[str, ...]) -> str:
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_is_whole(path: tuple[str, ...]) -> None:
    text = page(path)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.findall(r"--[a-z-]+…", text), "an option's name is cut off"
    assert not re.findall(r"\w- \w", text), "a word is divided in the middle of a line"
    assert not re.findall(r"<[a-z].*?>", text), "a type is given as Python has it"
    # Neither do paragraphs have line breaks of their own, nor do examples go on in the first column.
    prose, _, examples = text.partition("╭")[0].partition("Examples:")
    for line, following in itertools.pairwise(line.rstrip() for line in prose.splitlines()):
        assert not line or not following or len(f"{line} {following.split()[0]}") >= 80, line
    assert not [line for line in examples.splitlines() if line.strip() and not line.startswith("   ")]
    command = ROOT
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    words = " ".join(text.replace("│", " ").split())
    for option in command.params:
        if isinstance(option.default, str) and not option.hidden:  # type: ignore[attr-defined]
            assert f"[default: {option.default}]" in words, option.opts


def test_the_length_of_an_answer_is_said() -> None:
    assert "Default: 128 for generate, 512 for chat." in " ".join(page(("generate",)).replace("│", " ").split())


def test_the_value_of_an_option_is_not_taken_for_one(outrider: Outrider) -> None:
    run = outrider("generate", "--stop", "--tp", "x", "--nonsense")
    assert run.status == 2
    assert "--nonsense" in run.err


def test_where_there_is_no_such_option_none_is_named(outrider: Outrider) -> None:
    assert "--max-tokens" not in outrider("serve", "--n-predict", "5").err
