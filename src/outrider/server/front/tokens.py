"""Single tokens as text and as bytes, for log-probabilities and for people."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from outrider.engine.detokenize import BYTE_OF, Detokenizer
from outrider.models.tokenizer import Decoding, Tokenizer

CACHED_TOKENS = 1 << 16


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bytes = lru_cache(CACHED_TOKENS)(self._bytes)

    def text(self, token_id: int) -> str:
        """Bytes that are only part of a character come out as replacement characters."""
        return self.bytes(token_id).decode("utf-8", errors="replace")

    def pieces(self, token_ids: Sequence[int], text: str) -> list[str]:
        """What each token adds to the text that they were made from; together they are that text.

        A character of several tokens belongs to the last of them. A special token that does not stand in the text,
        such as one that begins every prompt, adds nothing.
        """
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        pieces, place = [], 0
        for token_id in token_ids:
            unseen = token_id in self._tokenizer.special_ids and not text.startswith(self.text(token_id), place)
            pieces.append("" if unseen else detokenizer.push(token_id))
            place += len(pieces[-1])
        if pieces:
            pieces[-1] += detokenizer.finish()
        return pieces

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.token(token_id)
        if token is None:
            return b""
        if self._tokenizer.decoding is Decoding.BYTE_LEVEL:
            try:
                return bytes(BYTE_OF[character] for character in token)
            except KeyError:
                # An added token is spelt as it is.
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode()
