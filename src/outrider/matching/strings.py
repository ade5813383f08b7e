"""JSON strings by length, pattern or format."""

from __future__ import annotations

from typing import Any

from outrider.errors import RequestError
from outrider.matching.ebnf import Rules, character_class, repeated
from outrider.matching.patterns import BACKSLASH, SHORT_ESCAPES, UNESCAPED, json_class, json_pattern

LENGTH_MAX = 100_000
COUNTED_MAX = 128

_DATE = (
    r"((\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"
_GROUP = r"[0-9a-f]{1,4}"
_PATH = r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})*)*"
_QUERY = r"([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-F]{2})*"
_POINTER = r"(/([^/~]|~[01])*)*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,4}Y(\d{1,2}M(\d{1,3}D)?)?|\d{1,2}M(\d{1,3}D)?|\d{1,3}D|\d{1,4}W"
    r"|T(\d{1,4}H(\d{1,2}M(\d{1,2}S)?)?|\d{1,4}M(\d{1,2}S)?|\d{1,6}S))",
    "email": rf"[A-Za-z0-9_+-]{{1,24}}(\.[A-Za-z0-9_+-]{{1,12}}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,3}}\.[a-z]{{2,12}}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": rf"({_GROUP}:){{7}}{_GROUP}|::({_GROUP}(:{_GROUP}){{0,5}})?|{_GROUP}::({_GROUP}(:{_GROUP}){{0,4}})?"
    rf"|({_GROUP}:){{2}}:({_GROUP}(:{_GROUP}){{0,3}})?|({_GROUP}:){{3}}:({_GROUP}(:{_GROUP}){{0,2}})?"
    rf"|({_GROUP}:){{4}}:({_GROUP}(:{_GROUP})?)?",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"[a-z][a-z0-9+.-]{{1,12}}://{_HOST}(:[1-9]\d{{0,3}})?{_PATH}(\?{_QUERY})?(#{_QUERY})?",
    "uri-reference": rf"([a-z][a-z0-9+.-]{{1,12}}://{_HOST})?{_PATH}(\?{_QUERY})?(#{_QUERY})?",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d{{0,3}})(#|{_POINTER})",
}
"""Narrower than their standards here and there; whatever they allow is right."""


CHARACTER = character_class(UNESCAPED)
ESCAPED = f"{BACKSLASH} [{''.join(SHORT_ESCAPES.values())}]"
QUOTE = '"\\""'


def any_rest(rules: Rules, shortest: int = 0, longest: int | None = None) -> str:
    """Any text of this length and the quote after it.

    One rule for each number of characters that may still come, which strings of all lengths share: masks are made in
    advance for each of them. Very long ones are counted by the compiler; they go without escapes, since only then are
    masks made in advance.
    """
    if max(shortest, longest or 0) > COUNTED_MAX:
        return f"{repeated(CHARACTER, shortest, longest)} {QUOTE}"
    if longest is None:
        rest = rules.named(f"({CHARACTER} | {ESCAPED})* {QUOTE}")
    else:
        rest = rules.named(QUOTE)
        for _ in range(longest - shortest):
            rest = rules.named(f"{QUOTE} | {CHARACTER} {rest} | {ESCAPED} {rest}")
    for _ in range(shortest):
        rest = rules.named(f"{CHARACTER} {rest} | {ESCAPED} {rest}")
    return rest


def literal_text(text: str) -> str:
    return " ".join(json_class(((ord(character), ord(character)),)) for character in text) or '""'


def string_rest(rules: Rules, schema: dict[str, Any], where: str) -> str:
    """What follows the first quote of a string that a schema describes."""
    ways: list[str] = [name for name in ("pattern", "format") if name in schema]
    if "minLength" in schema or "maxLength" in schema:
        ways.append("minLength and maxLength")
    if len(ways) > 1:
        raise RequestError(
            f"{where}: {' and '.join(ways)} cannot be kept to together; leave all but one out, or say all of it in one "
            "pattern"
        )
    if "pattern" in schema:
        expression = schema["pattern"]
        if not isinstance(expression, str):
            raise RequestError(f"{where}: pattern is a string, got {str(expression)[:60]!r}")
        try:
            # Nothing in particular anywhere in a text is any text.
            return f"{json_pattern(expression)} {QUOTE}" if expression else any_rest(rules)
        except RequestError as problem:
            raise RequestError(f"{where}, pattern: {problem}") from None
    if "format" in schema:
        name = schema["format"]
        if name not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise RequestError(
                f"{where}: format {str(name)[:60]!r} cannot be kept to; leave it out, write a pattern, or choose "
                f"one of {known}"
            )
        return f"{json_pattern(FORMATS[name])} {QUOTE}"
    shortest = count(schema, "minLength", where, LENGTH_MAX) or 0
    longest = count(schema, "maxLength", where)
    if longest is not None and longest < shortest:
        raise RequestError(f"{where}: maxLength {longest} is less than minLength {shortest}; no string is both")
    # The compiler counts no further, and nobody writes so much.
    return any_rest(rules, shortest, None if longest is None else min(longest, LENGTH_MAX))


def count(schema: dict[str, Any], name: str, where: str, at_most: int | None = None) -> int | None:
    """A number of characters, items or properties."""
    found = schema.get(name)
    if found is None and name not in schema:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or found != int(found) or found < 0:
        raise RequestError(f"{where}: {name} is a whole number, 0 or more, got {str(found)[:60]}")
    if at_most is not None and found > at_most:
        raise RequestError(f"{where}: {name} may be at most {at_most}, got {int(found)}")
    return int(found)
