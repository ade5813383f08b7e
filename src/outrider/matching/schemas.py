"""Which JSON schemas can be kept to, and why another cannot.

A keyword that the compiler would pass over in silence is refused: an output that breaks the client's schema is worse
than no output.
"""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import RequestError

IGNORED = frozenset(
    {
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")
DEPTH_MAX = 64


def check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError('the JSON schema is no JSON; send an object such as {"type": "object"}') from None
    _check(schema, "the schema", 0)


def _check(schema: Any, where: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError(f"{where}: a schema is an object, or true or false, got {json.dumps(schema)[:80]}")
    if depth > DEPTH_MAX:
        raise RequestError(f"{where}: schemas are nested more than {DEPTH_MAX} deep; name the inner ones in $defs")
    found = sorted(IGNORED & schema.keys())
    if found:
        raise RequestError(
            f"{where}: {', '.join(found)} cannot be kept to while text is generated; leave it out and check the output "
            "yourself"
        )
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise RequestError(f"{where}: allOf of several schemas cannot be kept to; write them as one")
    for name in NAMED:
        inner = schema.get(name)
        if isinstance(inner, dict):
            for key, each in inner.items():
                _check(each, f"{where}, {name} {key[:60]!r}", depth + 1)
    for name in LISTED:
        inner = schema.get(name)
        if isinstance(inner, list):
            for number, each in enumerate(inner):
                _check(each, f"{where}, {name} {number}", depth + 1)
    for name in SINGLE:
        inner = schema.get(name)
        if isinstance(inner, dict | bool):
            _check(inner, f"{where}, {name}", depth + 1)
