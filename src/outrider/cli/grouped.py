"""Options that several commands share: declared once, as the fields of a dataclass that a command takes whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer


def panel(title: str) -> Callable[..., Any]:
    """Returns `typer.Option` for options that help pages show under this title."""
    return functools.partial(typer.Option, rich_help_panel=title)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with each parameter whose type is a dataclass replaced by one option for each field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields_as_parameters(hints[name])
        else:
            parameters.append(_option(name, parameter.default, hints[name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields_as_parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    assert all(field.default is not MISSING for field in fields(group)), f"{group.__name__}: an option needs a default"
    return [_option(field.name, field.default, hints[field.name]) for field in fields(group)]


def _option(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
