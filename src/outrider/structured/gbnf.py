"""Grammars in GBNF (llama.cpp's notation), converted to the notation that llguidance reads."""

from __future__ import annotations

import re

from outrider.errors import RequestError

LITERAL, CLASS = r'"(?:[^"\\]|\\.)*', r"\[(?:[^\]\\]|\\.)*"
# One that is not closed takes all of the rest, so that each character is read once.
PIECE = re.compile(rf'{LITERAL}(?:"|\\?\Z)|{CLASS}(?:\]|\\?\Z)|#[^\r\n]*|.', re.DOTALL)
"""A literal, a class of characters, a comment, or any other character."""
ENDS = {'"': '"', "[": "]"}
CLOSED = re.compile(rf'{LITERAL}"|{CLASS}\]', re.DOTALL)
CODE_POINT = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.", re.DOTALL)
SET_OPERATIONS = ("&&", "--", "~~", "[:")
RULES_MAX = 1000
"""How many rules, groups and repetitions a grammar may have. llguidance compiles rules recursively, and a stack
overflow ends the process; its work grows with the square of the repetitions in a row."""


def lark_of(text: str) -> str:
    # Written in Python; few servers ever need it.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    pieces = PIECE.findall(text)
    if text.count("::=") + sum(piece in "(?*+{" for piece in pieces) > RULES_MAX:
        raise RequestError(f"the grammar has more than {RULES_MAX} rules, groups and repetitions; make it simpler")
    try:
        # Comments are left out: nothing that a client writes gets past the converter's own reading.
        return gbnf_to_lark("".join(_prepared(piece) for piece in pieces if not piece.startswith("#")) + "\n")
    except RequestError:
        raise
    except RecursionError:
        raise RequestError("the grammar is nested too deeply; make it simpler") from None
    except Exception as problem:
        raise RequestError(f"the grammar is not valid GBNF: {str(problem)[:200]}; correct it") from None


def _prepared(piece: str) -> str:
    """Returns a piece in a form that the converter carries over as it is meant."""
    if piece[0] not in '"[':
        return piece
    if not CLOSED.fullmatch(piece):
        raise RequestError(f"the grammar: {piece[:40]!r} is not closed; end it with {ENDS[piece[0]]}")
    if piece[0] == "[" and any(sign in piece for sign in SET_OPERATIONS):
        # To the regular expressions that they become, these are set operations.
        raise RequestError(f"the grammar: class {piece[:40]!r} has one of && -- ~~ [: in it; write each sign once")
    if "\n" in piece or "\r" in piece:
        raise RequestError(f"the grammar: {piece[:40]!r} has a line break in it; write \\n")
    return CODE_POINT.sub(_character, piece)


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise RequestError(f"the grammar: {escape[0]} is not a character; write the character itself")
    # The converter drops leading zeros, which changes what it reads.
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
