"""Regular expressions, read as JavaScript reads them, written as llguidance's dialect (Rust's), or refused by name.

An expression describes the whole text, with or without anchors. Two differences between the dialects matter: which
characters `.`, `\\s` and their kin stand for, and what a JSON string needs to escape. llguidance lets a class that
holds all control characters, such as `[^"]`, match an escaped quote, so classes lose what would have to be escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from outrider.errors import RequestError

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of code points with both ends included, in ascending order and without overlap."""

TEXT: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""All characters; surrogates are none."""

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
REPEATED = re.compile(r"([*+?]|\{(\d{1,6})(,(\d{1,6})?)?\})\??")
HEXADECIMAL = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
DEPTH_MAX = 64
EXPRESSION_MAX = 1 << 16
"""How many characters an expression may have: as many are read and compiled in less than a second, whatever they are,
and the server takes no longer ones either unless it is told to."""

UNESCAPED: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))
"""The characters that a JSON string may hold as they are."""
ESCAPED: Ranges = ((0x08, 0x0A), (0x0C, 0x0D), (0x22, 0x22), (0x5C, 0x5C))
"""The characters for which JSON has an escape of two characters."""


def text_pattern(expression: str) -> str:
    """Returns the expression for text as it stands."""
    return _Reader(expression, character_class).read()


def json_pattern(expression: str) -> str:
    """Returns the expression, anchored at both ends, for the value of a JSON string."""
    return f"^(?:{_Reader(expression, _json_class).read()})$"


def literal_pattern(text: str) -> str:
    """Returns the expression that matches this text alone."""
    return "".join(character_class(((ord(character), ord(character)),)) for character in text)


def character_class(ranges: Ranges) -> str:
    inside = (
        _spelt(low) if low == high else f"{_spelt(low)}-{_spelt(high)}" for low, high in common_ranges(ranges, TEXT)
    )
    return f"[{''.join(inside)}]"


def common_ranges(ranges: Ranges, others: Ranges) -> Ranges:
    pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return tuple(sorted((low, high) for low, high in pairs if low <= high))


def _json_class(ranges: Ranges) -> str:
    """Leaves out characters that JSON has to escape, unless there are no others; then the short escapes come first."""
    return character_class(common_ranges(ranges, UNESCAPED) or common_ranges(ranges, ESCAPED) or ranges)


def _spelt(code: int) -> str:
    character = chr(code)
    return character if code < 0x80 and character.isalnum() else f"\\u{{{code:x}}}"


class _Reader:
    """Reads an expression once and writes it in the other dialect on the way."""

    def __init__(self, expression: str, written: Callable[[Ranges], str]) -> None:
        self._text = expression
        self._at = 0
        self._written = written

    def read(self) -> str:
        if len(self._text) > EXPRESSION_MAX:
            raise RequestError(
                f"the regular expression {self._text[:80]!r}… has {len(self._text):,} characters; at most "
                f"{EXPRESSION_MAX:,} are compiled; make it shorter"
            )
        found = self._alternatives(0)
        if self._at < len(self._text):
            raise self._refused("a ) without its (", "write \\) for the character itself")
        return found

    def _alternatives(self, depth: int) -> str:
        if depth > DEPTH_MAX:
            raise self._refused(f"groups nested more than {DEPTH_MAX} deep", "make it simpler")
        ways = [self._sequence(depth)]
        while self._take("|"):
            ways.append(self._sequence(depth))
        return "|".join(ways)

    def _sequence(self, depth: int) -> str:
        if depth == 0:
            self._take("^")
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._take("$"):
                if depth or (self._at < len(self._text) and self._text[self._at] != "|"):
                    raise self._refused("$ before the end", "leave it out, or write \\$ for the character itself")
                break
            atom = self._atom(depth)
            if found := REPEATED.match(self._text, self._at):
                self._at = found.end()
                least, most = found[2], found[4]
                if most is not None and int(most) < int(least):
                    raise self._refused(f"{found[0]}, at most less than at least", "swap the two numbers")
                atom += found[1]
            parts.append(atom)
        return "".join(parts)

    def _atom(self, depth: int) -> str:
        if group := GROUP.match(self._text, self._at):
            self._at = group.end()
            inner = self._alternatives(depth + 1)
            if not self._take(")"):
                raise self._refused("a parenthesis that is not closed", "close it, or write \\( for the character")
            return f"(?:{inner})"
        character = self._text[self._at]
        if character == "(":
            what = self._text[self._at : self._at + 4]
            raise self._refused(f"a look-ahead, a look-behind or a flag: {what}", "spell out what it allows")
        self._at += 1
        match character:
            case "[":
                return self._written(self._class())
            case ".":
                return self._written(_without(LINE_ENDS))
            case "\\":
                return self._written(self._escape())
            case "^":
                raise self._refused("^ after the beginning", "leave it out, or write \\^ for the character itself")
            case "*" | "+" | "?" | "{":
                raise self._refused(f"{character} with nothing to repeat", f"write \\{character} for the character")
        return self._written(((ord(character), ord(character)),))

    def _class(self) -> Ranges:
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            members = self._class_member()
            rest = self._text[self._at : self._at + 2]
            if rest[:1] == "-" and rest[1:] not in ("]", ""):
                self._at += 1
                members = self._range(members, self._class_member())
            found.extend(members)
        ranges = _without(_joined(found)) if negated else _joined(found)
        if not common_ranges(ranges, TEXT):
            raise self._refused("a class without characters", "name some, or write \\[ for the character itself")
        return ranges

    def _range(self, first: Ranges, last: Ranges) -> Ranges:
        """Returns the characters that two members of a class with a hyphen between them stand for."""
        if not _is_character(first):
            # The hyphen behind \w and its kin is one of the characters, and begins no range with what follows it.
            return (*first, (ord("-"), ord("-")), *last)
        if not _is_character(last):
            raise self._refused("a range that ends in a class", "write \\- for the hyphen itself")
        if last < first:
            raise self._refused("a range that ends before it begins", "swap its ends")
        return ((first[0][0], last[0][1]),)

    def _class_member(self) -> Ranges:
        if self._at >= len(self._text):
            raise self._refused("a class that is not closed", "close it, or write \\[ for the character itself")
        character = self._text[self._at]
        self._at += 1
        return self._escape() if character == "\\" else ((ord(character), ord(character)),)

    def _escape(self) -> Ranges:
        if hexadecimal := HEXADECIMAL.match(self._text, self._at):
            code = int(next(filter(None, hexadecimal.groups())), 16)
            if not common_ranges(((code, code),), TEXT):
                raise self._refused(f"\\{hexadecimal[0]}, which is no character", "write the character itself")
            self._at = hexadecimal.end()
            return ((code, code),)
        letter, following = self._text[self._at : self._at + 1], self._text[self._at + 1 : self._at + 2]
        if letter in CONTROLS and not (letter == "0" and following.isdigit()):
            self._at += 1
            return ((CONTROLS[letter], CONTROLS[letter]),)
        for name, ranges in (("d", DIGITS), ("w", WORD), ("s", SPACE)):
            if letter.lower() == name:
                self._at += 1
                return ranges if letter == name else _without(ranges)
        if not letter or letter.isalnum():
            raise self._refused(f"\\{letter}", "write what it stands for, in a class such as [a-z]")
        self._at += 1
        return ((ord(letter), ord(letter)),)

    def _take(self, character: str) -> bool:
        found = self._text[self._at : self._at + 1] == character
        self._at += found
        return found

    def _refused(self, what: str, advice: str) -> RequestError:
        return RequestError(
            f"the regular expression {self._text[:80]!r} has, at character {self._at}, {what}, which cannot be "
            f"enforced; {advice}"
        )


def _is_character(ranges: Ranges) -> bool:
    return ranges[0][0] == ranges[-1][1]


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def _without(ranges: Ranges) -> Ranges:
    """Returns the ranges of all other characters."""
    left, start = [], 0
    for low, high in ranges:
        if start < low:
            left.append((start, low - 1))
        start = high + 1
    if start <= TEXT[-1][1]:
        left.append((start, TEXT[-1][1]))
    return tuple(left)
