"""Pieces of the compiler's own notation (GBNF): literals, classes of characters, named rules."""

from __future__ import annotations

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, both ends included, in order and apart."""

TEXT: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""All characters: surrogates are none."""


def quoted(text: str) -> str:
    return '"' + "".join(_spelt(ord(character), plain=" !#[]") for character in text) + '"'


def character_class(ranges: Ranges) -> str:
    inside = (
        _spelt(low) if low == high else f"{_spelt(low)}-{_spelt(high)}" for low, high in common_ranges(ranges, TEXT)
    )
    return f"[{''.join(inside)}]"


def either(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"


def repeated(expression: str, least: int, most: int | None) -> str:
    if most is None and least < 2:
        # The compiler makes masks in advance for these two, and not for {0,} and {1,}.
        return f"({expression}){'+' if least else '*'}"
    return f"({expression}){{{least},{'' if most is None else most}}}"


def common_ranges(ranges: Ranges, others: Ranges) -> Ranges:
    pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return tuple(sorted((low, high) for low, high in pairs if low <= high))


class Rules:
    """Expressions that have a name; equal ones share it."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._bodies: dict[str, str | None] = {}

    def reserve(self) -> str:
        """A name whose expression follows: it may refer to itself."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = None
        return name

    def define(self, name: str, expression: str) -> None:
        self._bodies[name] = expression

    def named(self, expression: str) -> str:
        name = self._names.get(expression)
        if name is None:
            name = self._names[expression] = self.reserve()
            self.define(name, expression)
        return name

    def __len__(self) -> int:
        return len(self._bodies)

    def text(self, root: str) -> str:
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())])


def _spelt(code: int, plain: str = "") -> str:
    character = chr(code)
    if code < 0x80 and (character.isalnum() or character in plain):
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
