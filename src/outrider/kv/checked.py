"""Typed errors for settings that are misspelt or missing, instead of Python's TypeError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from outrider.errors import ConfigError, OutriderError

T = TypeVar("T")


def whole_number(
    value: object, what: str, *, at_least: int, advice: str = "", error: type[OutriderError] = ConfigError
) -> None:
    """Refuse anything but a whole number of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        hint = f"; {advice}" if advice else ""
        raise error(f"{what} must be a whole number of at least {at_least}, got {value!r}{hint}")


def checked_fields(error: type[OutriderError] = ConfigError) -> Callable[[type[T]], type[T]]:
    """For a keyword-only dataclass: an unknown or missing field raises `error`, which names the known ones."""

    def decorate(cls: type[T]) -> type[T]:
        original: Any = cls.__dict__["__init__"]
        names = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]

        @wraps(original)
        def checked_init(self: T, *args: Any, **values: Any) -> None:
            try:
                original(self, *args, **values)
            except TypeError as problem:
                unknown = [name for name in values if name not in names]
                if unknown:
                    near = get_close_matches(unknown[0], names, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(names)}"
                    raise error(f"{cls.__name__} has no field {unknown[0]!r}; {hint}") from None
                if "argument" in str(problem) and "__init__" in str(problem):
                    what = str(problem).split("__init__() ")[-1]
                    raise error(f"{cls.__name__}: {what}; its fields are given by name") from None
                raise

        cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
        return cls

    return decorate
