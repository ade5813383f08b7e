"""What an engine and the process that compiles its grammars tell each other: MessagePack, each with its length."""

from __future__ import annotations

import msgspec

from outrider.frames import frame
from outrider.grammar import Grammar


class UseTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    spelling: list[bytes]
    eos_ids: tuple[int, ...]


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    grammar: Grammar


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    compiled: str = ""
    """As the compiler's library writes it."""


class BadGrammar(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    message: str


def framed(message: msgspec.Struct) -> bytes:
    return frame(msgspec.msgpack.encode(message))


def decode_order(body: bytes) -> UseTokens | Compile:
    order: UseTokens | Compile = msgspec.msgpack.decode(body, type=UseTokens | Compile)
    return order


def decode_answer(body: bytes) -> Done | BadGrammar:
    answer: Done | BadGrammar = msgspec.msgpack.decode(body, type=Done | BadGrammar)
    return answer
