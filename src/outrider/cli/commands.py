"""What all commands share: plain words for types in help pages, and answers to options of other engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from outrider.errors import ConfigError

METAVARS = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "Path": "PATH", "bool": ""}
"""How help pages show the values of these types; a flag has no value."""

OTHER_ENGINES = {
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--mem-fraction-static": "--gpu-memory-utilization",
}
"""Options of llama.cpp and SGLang, and their names here, which are vLLM's."""
PARALLELISM = ("--tensor-parallel-size", "--tp", "--tp-size", "--pipeline-parallel-size", "--pp-size")


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
            # typer does not export the class of this error.
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


def install_command_classes(app: typer.Typer) -> None:
    """Makes every command and group that is registered in the app an instance of the classes above."""
    app.info.cls = Group
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            install_command_classes(group.typer_instance)


def _explain(unknown: str, known: set[str]) -> None:
    if unknown in PARALLELISM:
        raise ConfigError(f"{unknown} is not supported: a model runs on one device; leave it out") from None
    ours = OTHER_ENGINES.get(unknown)
    if ours in known:
        raise ConfigError(f"there is no option {unknown}; use {ours}") from None


def _name_types(params: Iterable[Any]) -> None:
    for param in params:
        # Older versions of typer choose words of their own.
        if not hasattr(param, "bare_type"):
            continue
        if param.param_type_name == "argument":
            # An argument is shown by its own name; its type would add nothing.
            param.display_type_rich = lambda ctx: None
        elif param.metavar is None:
            param.metavar = METAVARS.get(param.bare_type().removeprefix("list[").removesuffix("]"))


def _as_flag(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option
