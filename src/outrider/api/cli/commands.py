"""How every command presents itself: types as words in help pages, and options that other engines have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from outrider.errors import ConfigError

WORDS = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "Path": "PATH", "bool": ""}
"""What help pages call values of these types; a flag takes none."""

ELSEWHERE = {
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--mem-fraction-static": "--gpu-memory-utilization",
}
"""Options of llama.cpp and SGLang, and what they are called here, as in vLLM."""
ONE_DEVICE = ("--tensor-parallel-size", "--tp", "--tp-size", "--pipeline-parallel-size", "--pp-size")


class Command(TyperCommand):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        _name_types(self.params)

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as problem:
            # The class of this error is typer's own affair.
            unknown = getattr(problem, "option_name", None)
            known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
            if isinstance(unknown, str) and unknown not in known:
                _explain(unknown, known)
            raise


class Group(TyperGroup):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        _name_types(self.params)

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


def dressed(app: typer.Typer) -> typer.Typer:
    """The app with these classes for all that is registered in it."""
    app.info.cls = Group
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            dressed(group.typer_instance)
    return app


def _explain(unknown: str, known: set[str]) -> None:
    if unknown in ONE_DEVICE:
        raise ConfigError(f"{unknown} is not there yet: a model runs on one device; leave it out") from None
    here = ELSEWHERE.get(unknown)
    if here in known:
        raise ConfigError(f"there is no option {unknown}; here it is called {here}") from None


def _name_types(params: Iterable[Any]) -> None:
    for param in params:
        # Older versions of typer have words of their own.
        if not hasattr(param, "bare_type"):
            continue
        if param.param_type_name == "argument":
            # It has its own name; a type behind it would say no more.
            param.display_type_rich = lambda ctx: None
        elif param.metavar is None:
            param.metavar = WORDS.get(param.bare_type().removeprefix("list[").removesuffix("]"))


def _as_flag(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option
