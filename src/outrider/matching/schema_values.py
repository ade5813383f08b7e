"""Values in schemas: their types, how they are written, and whether two schemas can allow the same one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outrider.errors import RequestError
from outrider.matching.ebnf import quoted

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
FOLLOWED_MAX = 16
"""References to references."""


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
    """None where the schema names none."""
    if "type" not in schema:
        return None
    named = schema["type"]
    types = (
        tuple(dict.fromkeys(named)) if isinstance(named, list) and all(isinstance(t, str) for t in named) else (named,)
    )
    wrong = [name for name in types if name not in TYPES]
    if wrong or not types:
        raise RequestError(f"{where}: type {json.dumps(named)[:80]} is none; choose of {', '.join(TYPES)}")
    return types


def is_one_of(value: Any, types: Sequence[str]) -> bool:
    found = type_of(value)
    return found in types or (found == "integer" and "number" in types)


def literal(value: Any) -> str:
    """As `json.dumps` writes it."""
    return quoted(json.dumps(value, ensure_ascii=False))


class _Facts(NamedTuple):
    types: frozenset[str]
    values: list[Any] | None
    """All that it allows, where it lists them."""
    tags: dict[str, list[Any]]
    """Properties that every value has, with what they can be."""


def are_disjoint(first: Any, second: Any, resolve: Callable[[str], Any]) -> bool:
    """Is there certainly no value that both allow?"""
    one, other = _facts(first, resolve), _facts(second, resolve)
    if one.values is not None and other.values is not None:
        return _apart(one.values, other.values)
    if not one.types & other.types:
        return True
    if one.types | other.types == {"object"}:
        return any(_apart(values, other.tags[name]) for name, values in one.tags.items() if name in other.tags)
    return False


def _apart(values: list[Any], others: list[Any]) -> bool:
    # 1 and 1.0 are one value, 1 and true are two.
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
    """An integer is a number."""
    return frozenset(types | ({"integer"} if "number" in types else set()))
