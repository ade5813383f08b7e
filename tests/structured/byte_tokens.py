"""Grammars over a vocabulary of single bytes: what a grammar accepts, and random texts that follow it."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import torch

from outrider.grammar import Grammar, GrammarKind
from outrider.structured.grammars import Grammars
from outrider.structured.matcher import Matcher
from outrider.structured.tokens import TokenTable

END = 256


@cache
def grammars() -> Grammars:
    spelling = [*(bytes([number]) for number in range(256)), b""]
    table = TokenTable(spelling=spelling, eos_ids=(END,), encode=lambda text: list(text.encode()))
    return Grammars(table, device=torch.device("cpu"))


def of_schema(schema: Any) -> Matcher:
    return grammars().matcher(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))


def of_regex(text: str) -> Matcher:
    return grammars().matcher(Grammar(kind=GrammarKind.REGEX, text=text))


def accepts(grammar: Matcher, text: str) -> bool:
    tokens = [*text.encode(), END]
    return grammar.count_allowed(tokens) == len(tokens)


def random_text(grammar: Matcher, rng: random.Random, *, longest: int = 300) -> str | None:
    """Returns a text that follows the grammar to its end, or None if it has not ended by then. Rare bytes are as likely
    as others, and bytes that close something are likelier, so that most texts end."""
    matcher, text = grammar.fork(), b""
    while len(text) < longest:
        mask = matcher.mask_after([])
        assert mask is not None
        allowed = mask.nonzero()[:, 0].tolist()
        assert allowed, f"nothing may follow {text!r}: {matcher.problem}"
        (token,) = rng.choices(allowed, [8.0 if token == END or token in b'"}]' else 1.0 for token in allowed])
        if token == END:
            return text.decode()
        matcher.accept([token])
        text += bytes([token])
    return None
