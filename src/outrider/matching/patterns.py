"""Regular expressions in the compiler's own notation, or refused.

The compiler's own reader of them passes over anchors and look-aheads inside an expression, lets "." match a line's
end, and writes quotes and control characters into JSON strings as they are. Here an expression is read as JavaScript
would read it, and describes the whole text, anchors or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from outrider.errors import RequestError
from outrider.matching.ebnf import TEXT, Ranges, character_class, common_ranges, either

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
UNROLLED_MAX = 16
UNROLLED_CHARACTERS_MAX = 4000

UNESCAPED: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))
"""What a JSON string may hold as it is."""
SHORT_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
BACKSLASH = '"\\\\"'


def text_pattern(expression: str) -> str:
    """For text as it stands."""
    return _Reader(expression, character_class).read()


def json_pattern(expression: str) -> str:
    """For what is between the quotes of a JSON string."""
    return _Reader(expression, json_class).read()


def json_class(ranges: Ranges) -> str:
    """One of these characters, as a JSON string spells it; escaped only if none needs no escape."""
    if plain := common_ranges(ranges, UNESCAPED):
        return character_class(plain)
    short = [letter for code, letter in SHORT_ESCAPES.items() if common_ranges(ranges, ((code, code),))]
    if short:
        return f"({BACKSLASH} [{''.join(short)}])"
    return either([f'({BACKSLASH} "u00{code:02x}")' for low, high in ranges for code in range(low, high + 1)])


class _Reader:
    """One pass over an expression, which writes as it reads."""

    def __init__(self, expression: str, written: Callable[[Ranges], str]) -> None:
        self._text = expression
        self._at = 0
        self._written = written

    def read(self) -> str:
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
        return either(ways)

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
                atom = _repeated(atom, found)
            parts.append(atom)
        return " ".join(parts) or '""'

    def _atom(self, depth: int) -> str:
        if group := GROUP.match(self._text, self._at):
            self._at = group.end()
            inner = self._alternatives(depth + 1)
            if not self._take(")"):
                raise self._refused("a parenthesis that is not closed", "close it, or write \\( for the character")
            return f"({inner})"
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
            if rest[:1] == "-" and rest[1:] not in ("]", "") and members[0][0] == members[-1][1]:
                self._at += 1
                last = self._class_member()
                if len(last) > 1 or last[0][1] < members[0][0]:
                    raise self._refused("a range that ends before it begins", "swap its ends")
                members = ((members[0][0], last[0][1]),)
            found.extend(members)
        ranges = _without(_joined(found)) if negated else _joined(found)
        if not common_ranges(ranges, TEXT):
            raise self._refused("a class without characters", "name some, or write \\[ for the character itself")
        return ranges

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
            f"the regular expression {self._text[:80]!r} has, at character {self._at}, {what}: this cannot be kept to; "
            f"{advice}"
        )


def _repeated(atom: str, found: re.Match[str]) -> str:
    sign, least, most = found[1], int(found[2] or 0), int(found[4] or found[2] or 0)
    if sign in "*+?":
        return atom + sign
    if found[3] == ",":
        return f"{atom}{{{least},}}" if least > 1 else atom + "*+"[least]
    if atom.startswith("[") or most > UNROLLED_MAX or most * len(atom) > UNROLLED_CHARACTERS_MAX:
        return f"{atom}{{{least},{most}}}"
    # The compiler makes masks in advance for what is written out, and for repeated classes alone.
    parts = [atom] * least + [f"({atom}"] * (most - least)
    return f"({' '.join(parts)}{')?' * (most - least)})" if parts else '""'


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def _without(ranges: Ranges) -> Ranges:
    """All characters but these."""
    left, start = [], 0
    for low, high in ranges:
        if start < low:
            left.append((start, low - 1))
        start = high + 1
    if start <= TEXT[-1][1]:
        left.append((start, TEXT[-1][1]))
    return tuple(left)
