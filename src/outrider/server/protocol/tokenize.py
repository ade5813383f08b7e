"""The bodies of POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from outrider.server.protocol.chat import ChatMessage, Tool
from outrider.server.protocol.fields import Fields


class TokenizeRequest(Fields):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: list[int]
