"""A tiny model whose text can end, and its vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tests.engine.tiny import tiny_model, tiny_spec

from outrider.models.load import LoadedModel
from outrider.structured.tokens import TokenTable, token_table

EOS = 200


@cache
def ending_model() -> LoadedModel:
    """Returns a model of three layers, so that every drafter has taps to read; token 200 ends a text."""
    return replace(tiny_model(tiny_spec(windows=(None, 7, None))), eos_ids=(EOS,))


@cache
def tiny_table() -> TokenTable:
    model = ending_model()
    return token_table(model.tokenizer, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)


def spelt(text: str) -> list[int]:
    """Returns the token ids of a text, one for each byte."""
    return ending_model().tokenizer.encode(text)
