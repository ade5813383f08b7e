"""Log-probabilities in the two formats of OpenAI's API: for chats and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.server.front.tokens import TokenTexts
from outrider.server.messages import Scored

LOGPROB_MIN = -9999.0
"""Value that stands for minus infinity, which JSON does not have."""


def chat_logprobs(entries: Sequence[Scored], texts: TokenTexts) -> list[dict[str, Any]]:
    return [
        _entry(scored.token, scored.logprob, texts)
        | {"top_logprobs": [_entry(token, logprob, texts) for token, logprob in scored.top]}
        for scored in entries
    ]


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": max(logprob, LOGPROB_MIN), "bytes": list(texts.bytes(token))}


class CompletionLogprobs:
    """Makes the four parallel lists of one choice; offsets count characters from the beginning of its text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def prompt(self, entries: Sequence[Scored | None], tokens: Sequence[int], text: str) -> dict[str, Any]:
        """Returns the lists for the tokens of a prompt that the text begins with."""
        part = self.part(entries, tokens, self._texts.pieces(tokens, text))
        # Some tokenizers normalise the text, so that the pieces are not exactly as long as the prompt.
        self._offset = len(text)
        return part

    def part(self, entries: Sequence[Scored | None], tokens: Sequence[int], pieces: Sequence[str]) -> dict[str, Any]:
        """Returns the lists for further tokens. A token without an entry, such as a prompt's first, has no
        probability."""
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(piece)
        tops = [None if scored is None else self._top(scored) for scored in entries]
        return {
            "tokens": [self._texts.text(token) for token in tokens],
            "token_logprobs": [None if scored is None else max(scored.logprob, LOGPROB_MIN) for scored in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, scored: Scored) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in scored.top:
            # Different tokens may have the same text; the most likely comes first.
            top.setdefault(self._texts.text(token), max(logprob, LOGPROB_MIN))
        # The sampled token is always among them.
        top.setdefault(self._texts.text(scored.token), max(scored.logprob, LOGPROB_MIN))
        return top


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}
