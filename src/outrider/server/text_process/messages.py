"""Messages between the front end and a text process, over its standard input and output.

Each frame holds a message as JSON, since integers in template variables may be larger than MessagePack allows. The
first message is a TextFacts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.frames import frame
from outrider.server.messages import TextFacts


class Encode(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    text: str
    add_special_tokens: bool = True
    tokens_max: int
    """Results with more tokens are returned as their length only."""


class Render(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A conversation to render with the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_last: bool = False
    """Whether the last message is the beginning of the answer."""
    tokens_max: int


class Tokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    count: int
    token_ids: list[int]
    """The tokens; empty if there are more than tokens_max."""


class BadText(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The conversation or text cannot be turned into tokens."""

    message: str


TextOrder = Encode | Render
TextAnswer = Tokens | BadText

encode = msgspec.json.Encoder().encode
decode_facts = msgspec.json.Decoder(TextFacts).decode
decode_order = msgspec.json.Decoder(TextOrder).decode
decode_answer = msgspec.json.Decoder(TextAnswer).decode


def framed(message: msgspec.Struct) -> bytes:
    return frame(encode(message))
