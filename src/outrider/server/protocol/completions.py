"""The body of POST /v1/completions."""

from __future__ import annotations

from pydantic import Field

from outrider.server.protocol.fields import GenerationFields

Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(GenerationFields):
    prompt: Prompt
    max_tokens: int | None = Field(default=16, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    """Refused unless the request goes to a prefill worker: some proxies send it there."""
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = False
    best_of: int | None = None
    """Refused unless it equals n: continuations are not ranked."""
    suffix: str | None = None
    """Refused unless it is empty: text is continued, not filled in."""
    add_special_tokens: bool = True
