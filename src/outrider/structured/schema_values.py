"""Values in JSON schemas: their types, and whether two schemas can allow the same value."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outrider.errors import RequestError

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
EXACT_MAX = 2**53
"""The largest whole number up to which llguidance, which reads numbers as doubles, writes every one exactly."""
FOLLOWED_MAX = 16
"""The longest chain of references to references that is followed."""


def type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value == int(value) else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def types_in(schema: dict[str, Any], where: str) -> tuple[str, ...] | None:
    """Returns the types that a schema names, or None if it names none."""
    if "type" not in schema:
        return None
    named = schema["type"]
    types = (
        tuple(dict.fromkeys(named)) if isinstance(named, list) and all(isinstance(t, str) for t in named) else (named,)
    )
    wrong = [name for name in types if name not in TYPES]
    if wrong or not types:
        raise RequestError(f"{where}: type {json.dumps(named)[:80]} is unknown; choose from {', '.join(TYPES)}")
    return types


def is_one_of(value: Any, types: Sequence[str]) -> bool:
    found = type_of(value)
    return found in types or (found == "integer" and "number" in types)


def check_exact(value: Any, where: str) -> None:
    """Raises RequestError for a listed value with a number that would not be written as it is."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_exact(each, where)
    elif isinstance(value, int) and abs(value) > EXACT_MAX:
        raise RequestError(f"{where}: {value} is beyond 2**53 and would be rounded; write it as a string")


def count(schema: dict[str, Any], name: str, where: str, at_most: int | None = None) -> int | None:
    """Returns a number of characters, items or properties, or None if the schema does not give it."""
    found = schema.get(name)
    if found is None and name not in schema:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or found != int(found) or found < 0:
        raise RequestError(f"{where}: {name} is a whole number, 0 or more, got {str(found)[:60]}")
    if at_most is not None and found > at_most:
        raise RequestError(f"{where}: {name} may be at most {at_most}, got {int(found)}")
    return int(found)


class _Facts(NamedTuple):
    types: frozenset[str]
    values: list[Any] | None
    """All values that the schema allows, where it lists them."""
    tags: dict[str, list[Any]]
    """Properties that every value has, with the values that they can take."""


def are_disjoint(first: Any, second: Any, resolve: Callable[[str], Any]) -> bool:
    """Returns whether it is certain that no value is allowed by both schemas."""
    one, other = _facts(first, resolve), _facts(second, resolve)
    if one.values is not None and other.values is not None:
        return _apart(one.values, other.values)
    if not one.types & other.types:
        return True
    if one.types | other.types == {"object"}:
        return any(_apart(values, other.tags[name]) for name, values in one.tags.items() if name in other.tags)
    return False


def _apart(values: list[Any], others: list[Any]) -> bool:
    # 1 and 1.0 are the same value; 1 and true are not.
    def key(value: Any) -> tuple[bool, str]:
        if isinstance(value, float) and value == int(value):
            value = int(value)
        return isinstance(value, bool), json.dumps(value, sort_keys=True)

    return {key(value) for value in values}.isdisjoint(key(value) for value in others)


def _facts(schema: Any, resolve: Callable[[str], Any], followed: int = 0) -> _Facts:
    every = frozenset(TYPES)
    if not isinstance(schema, dict) or followed > FOLLOWED_MAX:
        return _Facts(every, None, {})
    if isinstance(schema.get("$ref"), str):
        return _facts(resolve(schema["$ref"]), resolve, followed + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return _Facts(_with_integers({type_of(value) for value in values}), values, {})
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            inner = [_facts(each, resolve, followed + 1) for each in schema[name]]
            return _Facts(frozenset().union(*(facts.types for facts in inner)), None, {})
    named = schema.get("type")
    types = named if isinstance(named, list) else [named] if isinstance(named, str) else list(every)
    tags = {}
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        for name in required:
            found = _facts(properties.get(name, True), resolve, followed + 1) if isinstance(name, str) else None
            if found is not None and found.values is not None:
                tags[name] = found.values
    return _Facts(_with_integers(set(types)), None, tags)


def _with_integers(types: set[str]) -> frozenset[str]:
    """Adds integers where there are numbers: every integer is a number."""
    return frozenset(types | ({"integer"} if "number" in types else set()))
