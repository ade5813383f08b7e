"""Schemas that need themselves: a text that follows one is never complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def endless_reference(references: Iterable[str], resolve: Callable[[str], Any]) -> str | None:
    """The first reference whose schema no value fulfils, however long."""
    left, ends = list(references), set[str]()
    found = True
    while found:
        found = False
        for reference in left:
            if reference not in ends and _can_end(resolve(reference), ends):
                ends.add(reference)
                found = True
    return next((reference for reference in left if reference not in ends), None)


def _can_end(schema: Any, ends: set[str]) -> bool:
    """Has the schema a value, if those of `ends` have? Its translation was made, so it is well formed."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return schema is not False
    if "$ref" in schema:
        return schema["$ref"] in ends
    for head in ("anyOf", "oneOf", "allOf"):
        if head in schema:
            return any(_can_end(each, ends) for each in schema[head])
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named
    if types is None:
        # Without a type it is taken for what its keywords speak of; the other of these two has none of them.
        return _array_can_end(schema, ends) and _object_can_end(schema, ends)
    checks = {"array": _array_can_end, "object": _object_can_end}
    return any(name not in checks or checks[name](schema, ends) for name in types)


def _object_can_end(schema: dict[str, Any], ends: set[str]) -> bool:
    if "properties" in schema:
        return all(_can_end(schema["properties"][name], ends) for name in schema.get("required", ()))
    values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
    return not schema.get("minProperties") or _can_end(values[0], ends)


def _array_can_end(schema: dict[str, Any], ends: set[str]) -> bool:
    least, first, rest = schema.get("minItems", 0), schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    needed = [*first[: int(least)], *([rest] if least > len(first) else [])]
    return all(_can_end(each, ends) for each in needed)
