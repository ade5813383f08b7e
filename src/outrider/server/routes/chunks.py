"""The chunks of a streamed completion or chat completion, and the fields of a choice beyond OpenAI's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.server.front.problems import Problem
from outrider.server.front.totals import Totals
from outrider.server.http.event_stream import DONE, event
from outrider.server.messages import Delta
from outrider.server.protocol.fields import GenerationFields

ORIGINS = {"p": "plain", "a": "accepted", "c": "corrected", "b": "bonus"}


class Chunks:
    """Writes choices as server-sent events, with the fields that all chunks of an answer have in common."""

    def __init__(self, body: GenerationFields, common: dict[str, Any]) -> None:
        self._body = body
        self._common = common

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._body.wants_usage else {}
        return event({**self._common, "choices": choices, **(usage | more)})

    def delta(self, choice: dict[str, Any], totals: Totals, usage: dict[str, Any]) -> bytes:
        more: dict[str, Any] = {"usage": usage} if self._body.wants_usage_always else {}
        # A chunk without choices is sent only to clients that ask for usage, since others fail on it.
        if totals.complete and not self._body.wants_usage:
            more["metrics"] = totals.metrics()
        return self.chunk([choice], **more)

    def last(self, totals: Totals, usage: dict[str, Any]) -> Iterable[bytes]:
        if self._body.wants_usage:
            yield self.chunk([], usage=usage, metrics=totals.metrics())
        yield DONE

    def failed(self, problem: Problem) -> Iterable[bytes]:
        yield event(problem.body())
        yield DONE


def extras(body: GenerationFields, deltas: Sequence[Delta]) -> dict[str, Any]:
    """Returns the fields that a client has to ask for."""
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
