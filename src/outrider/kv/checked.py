"""Typed errors for settings that are misspelt, missing or of the wrong type, instead of Python's TypeError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

from outrider.errors import ConfigError, OutriderError
from outrider.kv.intervals import Interval

T = TypeVar("T")


def whole_number(
    value: object, what: str, *, at_least: int, advice: str = "", error: type[OutriderError] = ConfigError
) -> None:
    """Refuse anything but a whole number of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        hint = f"; {advice}" if advice else ""
        raise error(f"{what} must be a whole number of at least {at_least}, got {value!r}{hint}")


def is_word(value: object) -> bool:
    """Whether the value is a whole number of 32 bits, as token ids and page numbers are."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def text(value: object, what: str, *, empty: bool = True, error: type[OutriderError] = ConfigError) -> None:
    """Refuse anything but text, and empty text unless it may be."""
    if not isinstance(value, str) or not (value or empty):
        raise error(f"{what} must be {'text' if empty else 'text that is not empty'}, got {value!r}")


def one_of(value: object, kind: type[Enum], what: str, *, error: type[OutriderError] = ConfigError) -> None:
    """Refuse anything but a member of the enumeration."""
    if not isinstance(value, kind):
        allowed = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise error(f"{what} must be one of {allowed}, got {value!r}")


def checked_interval(value: object, what: str, error: type[OutriderError]) -> Interval:
    """Refuse anything but an Interval of positions."""
    if not isinstance(value, Interval) or not all(isinstance(end, int) and not isinstance(end, bool) for end in value):
        raise error(f"{what} must be an Interval of whole numbers, got {value!r}")
    if not 0 <= value.start <= value.end:
        raise error(f"{what} must not start before 0 or end before it starts, got {value}")
    return value


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
