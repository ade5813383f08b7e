"""POST /v1/completions."""

from __future__ import annotations

from pydantic import Field

from outrider.server.protocol.fields import GenerationFields

Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(GenerationFields):
    prompt: Prompt
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = False
    best_of: int | None = None
    """Accepted where it equals n: only the best of more would differ."""
    suffix: str | None = None
    """Accepted where it is empty: no text is filled in between."""
    add_special_tokens: bool = True
