"""A grammar that anybody can check: the outputs are listed. And a tiny model whose text can end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from tests.engine.tiny import tiny_model, tiny_spec

from outrider.matching.tokens import TokenTable, token_table
from outrider.models.load import LoadedModel

EOS = 200


class ListedState:
    """Follows `outputs` by comparing strings: no automaton, nothing to roll back but a list."""

    def __init__(self, outputs: Sequence[bytes], table: TokenTable, taken: Sequence[int] = ()) -> None:
        self._outputs = outputs
        self._table = table
        self.taken = list(taken)

    def allowed(self) -> set[int]:
        if EOS in self.taken:
            return set()
        text = b"".join(self._table.spelling[token] for token in self.taken)
        going_on = {
            token
            for token, spelling in enumerate(self._table.spelling)
            if spelling and any(output.startswith(text + spelling) for output in self._outputs)
        }
        return going_on | ({EOS} if text in self._outputs else set())

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.taken.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        self.taken = self.taken[: len(self.taken) - num_tokens]

    def is_terminated(self) -> bool:
        return EOS in self.taken

    def fill_next_token_bitmask(self, bitmask: torch.Tensor) -> bool:
        bits = np.zeros(bitmask.numel() * 32, dtype=np.uint8)
        bits[list(self.allowed())] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)
        bitmask.copy_(torch.from_numpy(words.copy()).view(bitmask.shape))
        return True

    def fork(self) -> ListedState:
        return ListedState(self._outputs, self._table, self.taken)


@cache
def ending_model() -> LoadedModel:
    """Three layers, so that every drafter has taps to read; token 200 ends a text."""
    return replace(tiny_model(tiny_spec(windows=(None, 7, None))), eos_ids=(EOS,))


@cache
def tiny_table() -> TokenTable:
    model = ending_model()
    return token_table(model.tokenizer, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)


def spelt(text: str) -> list[int]:
    """Token ids of a text: one for each byte."""
    return ending_model().tokenizer.encode(text)
