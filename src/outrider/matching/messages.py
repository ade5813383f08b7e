"""What an engine and the process that compiles its grammars tell each other: MessagePack, each with its length."""

from __future__ import annotations

import msgspec

from outrider.grammar import Grammar

LENGTH_BYTES = 8


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
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_order(body: bytes) -> UseTokens | Compile:
    order: UseTokens | Compile = msgspec.msgpack.decode(body, type=UseTokens | Compile)
    return order


def decode_answer(body: bytes) -> Done | BadGrammar:
    answer: Done | BadGrammar = msgspec.msgpack.decode(body, type=Done | BadGrammar)
    return answer
