"""Values in JSON schemas: their types, and whether two schemas can allow the same value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from outrider.errors import RequestError

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
EXACT_MAX = 2**53
"""The largest whole number up to which llguidance, which reads numbers as doubles, writes every one exactly."""
EXPONENT_MAX = 308
"""The largest power of ten that a double holds."""
FOLLOWED_MAX = 16
"""The longest chain of references to references that is followed."""
LOOKED_AT_MAX = 5000
"""How many schemas are looked at to tell the options of one oneOf apart; beyond it, nothing is known of the others."""


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
    elif isinstance(value, float) and as_llguidance_reads(value) != value:
        raise RequestError(f"{where}: {value} has too many digits and would be rounded; write it as a string")


def as_llguidance_reads(value: float) -> float:
    """Returns the number that llguidance takes a float's digits for.

    Its JSON reader rounds twice: the digits as one whole number, then that number times or by a power of ten.
    """
    _sign, digits, exponent = Decimal(repr(abs(value))).as_tuple()
    assert isinstance(exponent, int), "numbers in a schema are finite"
    read = float(int("".join(map(str, digits))))
    while exponent < -EXPONENT_MAX:
        read, exponent = read / float(f"1e{EXPONENT_MAX}"), exponent + EXPONENT_MAX
    power = float(f"1e{abs(exponent)}")
    return math.copysign(read / power if exponent < 0 else read * power, value)


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
    values: frozenset[str] | None
    """All values that the schema allows, where it lists them, as canonical JSON."""
    tags: dict[str, frozenset[str]]
    """Properties that every value has, with the values that they can take."""


UNKNOWN = _Facts(frozenset(TYPES), None, {})


def first_overlap(schemas: Sequence[Any], resolve: Callable[[str], Any]) -> tuple[int, int] | None:
    """Returns the places of two schemas that may allow the same value; None if it is certain that no two do."""
    reader = _FactsReader(resolve)
    facts = [reader.facts(schema) for schema in schemas]
    for number, second in enumerate(facts):
        for earlier, first in enumerate(facts[:number]):
            if not _are_disjoint(first, second):
                return earlier, number
    return None


def _are_disjoint(one: _Facts, other: _Facts) -> bool:
    if one.values is not None and other.values is not None:
        return one.values.isdisjoint(other.values)
    if not one.types & other.types:
        return True
    if one.types | other.types == {"object"}:
        return any(values.isdisjoint(other.tags[name]) for name, values in one.tags.items() if name in other.tags)
    return False


class _FactsReader:
    """Reads what is certain of schemas, within a bound on their number."""

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._looked_at = 0

    def facts(self, schema: Any, followed: int = 0) -> _Facts:
        self._looked_at += 1
        if not isinstance(schema, dict) or followed > FOLLOWED_MAX or self._looked_at > LOOKED_AT_MAX:
            return UNKNOWN
        if isinstance(schema.get("$ref"), str):
            return self.facts(self._resolve(schema["$ref"]), followed + 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            listed = frozenset(map(_canonical, values))
            return _Facts(_with_integers({type_of(value) for value in values}), listed, {})
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(name), list):
                inner = [self.facts(each, followed + 1) for each in schema[name]]
                return _Facts(frozenset().union(*(facts.types for facts in inner)), None, {})
        named = schema.get("type")
        types = named if isinstance(named, list) else [named] if isinstance(named, str) else TYPES
        return _Facts(_with_integers(set(types)), None, self._tags(schema, followed))

    def _tags(self, schema: dict[str, Any], followed: int) -> dict[str, frozenset[str]]:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return {}
        found = {
            name: self.facts(properties.get(name, True), followed + 1).values
            for name in required
            if isinstance(name, str)
        }
        return {name: values for name, values in found.items() if values is not None}


def _canonical(value: Any) -> str:
    """Returns JSON that is equal for equal values: 1 and 1.0 are the same value, 1 and true are not."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    return value


def _with_integers(types: set[str]) -> frozenset[str]:
    """Adds integers where there are numbers: every integer is a number."""
    return frozenset(types | ({"integer"} if "number" in types else set()))
