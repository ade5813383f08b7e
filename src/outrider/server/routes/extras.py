"""What a choice carries beyond OpenAI's fields, where the client asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.server.messages import Delta
from outrider.server.protocol.fields import GenerationFields

ORIGINS = {"p": "plain", "a": "accepted", "c": "corrected", "b": "bonus"}


def extras(body: GenerationFields, deltas: Sequence[Delta]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["token_ids"] = [token for delta in deltas for token in delta.token_ids]
    if body.return_token_origins:
        found["token_origins"] = [
            {"id": token, "text": piece, "origin": ORIGINS[letter]}
            for delta in deltas
            for token, piece, letter in zip(delta.token_ids, delta.pieces, delta.origins, strict=True)
        ]
    return found
