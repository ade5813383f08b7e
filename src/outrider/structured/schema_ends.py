"""Schemas whose values would contain themselves without end, so that no text is ever complete."""

from __future__ import annotations

from typing import Any


def endless_definitions(definitions: list[dict[str, Any]]) -> list[int]:
    """Returns the numbers of the definitions, in rewritten form, that no finite value fulfils."""
    left, grew = set(range(len(definitions))), True
    while grew:
        finite = {number for number in left if _is_finite(definitions[number], left)}
        left -= finite
        grew = bool(finite)
    return sorted(left)


def _is_finite(schema: Any, endless: set[int]) -> bool:
    """Returns whether the schema has a finite value that needs none of the definitions `endless`."""
    if schema is False:
        return False
    if "$ref" in schema:
        return int(schema["$ref"].rpartition("/")[2]) not in endless
    if "anyOf" in schema:
        return any(_is_finite(each, endless) for each in schema["anyOf"])
    match schema.get("type"):
        case "array":
            first, least = schema.get("prefixItems", []), schema["minItems"]
            needed = [*first[:least], *([schema["items"]] if least > len(first) else [])]
        case "object":
            needed = [schema["properties"][name] for name in schema.get("required", ())]
            if schema.get("minProperties"):
                needed += [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")][:1]
        case _:
            return True
    return all(_is_finite(each, endless) for each in needed)
