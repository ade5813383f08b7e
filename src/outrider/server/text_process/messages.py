"""What the front end and a text process tell each other, over its standard input and output.

Each frame holds a message as JSON: integers that templates get may be larger than MessagePack's. The first is a
TextSetup.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.frames import frame


class TextSetup(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    tokenizer: str
    tokenizer_source: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    templates: dict[str, str]
    template_source: str
    template_variables: dict[str, str]
    memory_bytes_max: int


class Encode(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    text: str
    add_special_tokens: bool = True
    tokens_max: int
    """Longer results come back as their length only."""


class Render(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A conversation by the model's template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_last: bool = False
    """The last message is the beginning of the answer."""
    tokens_max: int


class Tokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    count: int
    token_ids: list[int]
    """Empty if there are more than were wanted."""


class BadText(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """This conversation or text cannot be used."""

    message: str


TextOrder = Encode | Render
TextAnswer = Tokens | BadText

encode = msgspec.json.Encoder().encode
decode_setup = msgspec.json.Decoder(TextSetup).decode
decode_order = msgspec.json.Decoder(TextOrder).decode
decode_answer = msgspec.json.Decoder(TextAnswer).decode


def framed(message: msgspec.Struct) -> bytes:
    return frame(encode(message))
