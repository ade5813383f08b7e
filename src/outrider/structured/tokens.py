"""The model's vocabulary as llguidance needs it: the bytes that each token stands for, and its end-of-text tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from outrider.engine.detokenize import token_bytes
from outrider.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    spelling: list[bytes]
    """The bytes of each token, by id. Special tokens and unused ids have none, so that no grammar allows them."""
    eos_ids: tuple[int, ...]
    """The end-of-text tokens, which a mask allows exactly where the output may end."""
    encode: Callable[[str], list[int]]
    """Splits text that a grammar dictates into tokens, as the text that the model was trained on was split."""

    def native(self) -> LLTokenizer:
        """Returns llguidance's form of this table. Building it takes about a tenth of a second."""
        from llguidance import LLTokenizer

        # llguidance's stubs ask for its own wrapper class; any object with these attributes will do.
        return LLTokenizer(
            _Wrapper(self),  # type: ignore[arg-type]
            n_vocab=len(self.spelling),
            eos_token=list(self.eos_ids),
        )


def token_table(tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Iterable[int]) -> TokenTable:
    spelling = []
    for number in range(vocab_size):
        token = None if number in tokenizer.special_ids else tokenizer.token(number)
        spelling.append(b"" if token is None else token_bytes(token, tokenizer.decoding))
    ends = tuple(sorted({number for number in eos_ids if number < vocab_size}))
    for number in ends:
        spelling[number] = b""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return TokenTable(spelling=spelling, eos_ids=ends, encode=encode)


class _Wrapper:
    """The tokenizer interface that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.spelling
        self.special_token_ids = list(table.eos_ids)
        self.eos_token_id = table.eos_ids[0]
        self._encode = table.encode
        self._single = {spelling: number for number, spelling in enumerate(table.spelling) if len(spelling) == 1}

    def __call__(self, text: str) -> list[int]:
        tokens = self._encode(text)
        written = text.encode()
        if b"".join(self.tokens[token] for token in tokens) != written:
            # Some tokenizers normalise text or put a space in front of it; single bytes are always exact.
            tokens = [self._single[written[at : at + 1]] for at in range(len(written))]
        return tokens
