"""What each token of a model spells, as a grammar sees it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from outrider.engine.detokenize import token_bytes
from outrider.models.tokenizer import Tokenizer


class TokenTable(msgspec.Struct, frozen=True, kw_only=True):
    """Compared and sent to other processes as it is."""

    spelling: list[bytes]
    """By token id; empty for special tokens and for ids that stand for nothing: no grammar allows those."""
    eos_ids: tuple[int, ...]
    """Possible exactly where the output may end."""


def token_table(tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Iterable[int]) -> TokenTable:
    spelling = []
    for number in range(vocab_size):
        token = None if number in tokenizer.special_ids else tokenizer.token(number)
        spelling.append(b"" if token is None else token_bytes(token, tokenizer.decoding))
    ends = tuple(sorted({number for number in eos_ids if number < vocab_size}))
    for number in ends:
        spelling[number] = b""
    return TokenTable(spelling=spelling, eos_ids=ends)
