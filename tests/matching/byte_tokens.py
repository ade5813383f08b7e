"""Grammars over single bytes: what a grammar accepts, and texts that follow it at random."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import torch
import xgrammar

from outrider.grammar import Grammar, GrammarKind
from outrider.matching.native import compile_grammar, native_tokens

END = 256
WORDS = (END + 1 + 31) // 32


@cache
def compiler() -> Any:
    tokens = native_tokens([*(bytes([number]) for number in range(256)), b""], (END,))
    return xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


def compiled(grammar: Grammar) -> Any:
    return compile_grammar(compiler(), grammar)


def of_schema(schema: Any) -> Any:
    return compiled(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))


def of_regex(text: str) -> Any:
    return compiled(Grammar(kind=GrammarKind.REGEX, text=text))


def accepts(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


def random_text(grammar: Any, rng: random.Random, *, longest: int = 300) -> str | None:
    """A text that follows the grammar to its end; None if it has not ended by then. Rare bytes are as likely as
    others, and what closes something is likelier, so that most texts end."""
    matcher, bitmask, text = xgrammar.GrammarMatcher(grammar), torch.zeros((1, WORDS), dtype=torch.int32), b""
    while len(text) < longest:
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")[: END + 1]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, f"nothing may follow {text!r}"
        (token,) = rng.choices(allowed, [8.0 if token == END or token in b'"}]' else 1.0 for token in allowed])
        assert matcher.accept_token(token)
        if token == END:
            return text.decode()
        text += bytes([token])
    return None
