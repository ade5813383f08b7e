"""Single tokens as text and as bytes, for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from outrider.engine.detokenize import BYTE_OF, Detokenizer
from outrider.models.tokenizer import Decoding, Tokenizer

CACHED_TOKENS = 1 << 16


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes = lru_cache(CACHED_TOKENS)(self._bytes)

    def text(self, token_id: int) -> str:
        """Returns the token's text, with replacement characters for bytes that are only part of a character."""
        return self.bytes(token_id).decode("utf-8", errors="replace")

    def pieces(self, token_ids: Sequence[int], text: str) -> list[str]:
        """Returns the piece of `text` that each of its tokens stands for; joined, the pieces are the text.

        A character of several tokens belongs to the last of them. A special token that is not in the text, such as
        one that begins every prompt, has an empty piece.
        """
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        pieces, offset = [], 0
        for token_id in token_ids:
            absent = token_id in self.tokenizer.special_ids and not text.startswith(self.text(token_id), offset)
            pieces.append("" if absent else detokenizer.push(token_id))
            offset += len(pieces[-1])
        if pieces:
            pieces[-1] += detokenizer.finish()
        return pieces

    def _bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.token(token_id)
        if token is None:
            return b""
        if self.tokenizer.decoding is Decoding.BYTE_LEVEL:
            try:
                return bytes(BYTE_OF[character] for character in token)
            except KeyError:
                # The text of an added token is not encoded.
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode()
