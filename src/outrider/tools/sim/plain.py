"""Dataclasses from plain data, as JSON brings it: every field is checked, and an error names the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from outrider.errors import TraceError

T = TypeVar("T")

LARGEST = 1 << 53
"""Whole numbers up to here survive every reader and writer of JSON."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def read(cls: type[T], data: object, where: str) -> T:
    """Build a dataclass; raises TraceError with the place and what belongs there."""
    if not isinstance(data, Mapping):
        raise TraceError(f"{where} must be an object with the fields of {cls.__name__}, got {_short(data)}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(known)}"
            raise TraceError(f"{where} has no field {name!r} in this version; {hint}")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise TraceError(f"{where} lacks the field {name!r}; give the file that a failing run wrote")
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(hint: Any, value: object, where: str) -> Any:
    if is_dataclass(hint):
        return read(hint, value, where)  # type: ignore[arg-type]
    if get_origin(hint) is UnionType:
        options = get_args(hint)
        if value is None and NoneType in options:
            return None
        (hint,) = [option for option in options if option is not NoneType]
        return _value(hint, value, where)
    if get_origin(hint) is tuple:
        return _tuple(get_args(hint), value, where)
    accepted = (int, float) if hint is float else (hint,)
    # To Python a bool is a whole number; to a reader of traces it is not.
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise TraceError(f"{where} must be {_WORDS[hint]}, got {_short(value)}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise TraceError(f"{where} must not be beyond {LARGEST}, got {_short(value)}")
    return value


def _tuple(parts: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TraceError(f"{where} must be a list, got {_short(value)}")
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(value)
    if len(value) != len(parts):
        raise TraceError(f"{where} must have {len(parts)} items, got {len(value)}")
    return tuple(_value(part, item, f"{where}[{n}]") for n, (part, item) in enumerate(zip(parts, value, strict=True)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
