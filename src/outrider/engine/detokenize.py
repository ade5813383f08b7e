"""Incremental detokenization: the same text, piece by piece, as decoding all tokens at once.

Every token costs the same, however long the text is already. Bytes that are not text yet (the first bytes of a
character whose last ones are still to come) are held back until they are, or until the end.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from outrider.models.tokenizer import Decoding, Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes one text. `push` takes a token and returns what has become text; `finish` returns what was held back."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._text: _Text
        if tokenizer.decoding is Decoding.BYTE_LEVEL:
            self._text = _ByteLevelText()
        else:
            self._text = _PieceText(strips_first_space=tokenizer.decoding is Decoding.PIECES_STRIPPED)

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes, which may be empty."""
        token = None if token_id in self._skipped else self._tokenizer.token(token_id)
        return "" if token is None else self._text.append(token)

    def finish(self) -> str:
        """Returns the rest. Bytes that never became a character come out as replacement characters."""
        return self._text.finish()


class _Text(Protocol):
    def append(self, token: str) -> str: ...

    def finish(self) -> str: ...


def _byte_characters() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 characters stand for themselves, U+0100 and on for other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_characters()


def token_bytes(token: str, decoding: Decoding) -> bytes:
    """Returns the bytes that a token adds to a text, anywhere but at its beginning."""
    if decoding is Decoding.BYTE_LEVEL:
        return _byte_level(token)
    byte = _raw_byte(token)
    return token.replace("▁", " ").encode("utf-8") if byte is None else bytes([byte])


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        # An added token is plain text, not spelt in this alphabet.
        return token.encode("utf-8")


class _ByteLevelText:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token: str) -> str:
        return self._decoder.decode(_byte_level(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceText:
    """Text of a SentencePiece tokenizer. A run of raw bytes is valid only as a whole, so it is held back until it
    ends."""

    def __init__(self, *, strips_first_space: bool) -> None:
        self._run = bytearray()
        self._strips_next_space = strips_first_space

    def append(self, token: str) -> str:
        byte = _raw_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._out(self._end_run() + token.replace("▁", " "))

    def finish(self) -> str:
        return self._out(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _out(self, text: str) -> str:
        if text and self._strips_next_space:
            self._strips_next_space = False
            return text.removeprefix(" ")
        return text


def _raw_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
