"""Grammars of one engine: checks what a client sent and starts a matcher for it."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.structured.gbnf import lark_of
from outrider.structured.matcher import Matcher
from outrider.structured.patterns import EXPRESSION_MAX, literal_pattern, text_pattern
from outrider.structured.schemas import rewritten_schema
from outrider.structured.tokens import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

KEPT_MAX = 64
"""How many definitions are kept in llguidance's form; each is about as long as what the client sent."""
JSON_OPTIONS: JsonCompileOptions = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as Python's json.dumps writes it, on one line."""
MESSAGE_CHARACTERS = 300


def is_installed() -> bool:
    return find_spec("llguidance") is not None


class Grammars:
    def __init__(self, table: TokenTable, *, device: torch.device) -> None:
        self._table = table
        self._device = device

    def prepare(self) -> None:
        """Loads llguidance and the vocabulary now rather than with the first grammar."""
        self.matcher(Grammar(kind=GrammarKind.JSON_OBJECT))

    def matcher(self, grammar: Grammar) -> Matcher:
        """Returns a matcher at the beginning of the grammar, or raises RequestError with what is wrong with it."""
        from llguidance import LLMatcher

        definition = native_definition(grammar)

        def start() -> LLMatcher:
            return LLMatcher(self._tokenizer, definition, log_level=0, limits=_limits())

        native = start()
        if native.is_error():
            reason = native.get_error().splitlines()[0].rstrip(".")
            raise RequestError(f"the {grammar.kind.value} is refused: {reason[:MESSAGE_CHARACTERS]}; correct it")
        matcher = Matcher(
            native, start, eos_ids=self._table.eos_ids, vocab_size=len(self._table.spelling), device=self._device
        )
        matcher.masks([])
        if matcher.problem is not None:
            raise RequestError(f"the {grammar.kind.value}: at its first token, {matcher.problem}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._table.native()


@lru_cache(maxsize=KEPT_MAX)
def native_definition(grammar: Grammar) -> str:
    """Returns the grammar as llguidance reads it, or raises RequestError."""
    from llguidance import LLMatcher

    if grammar.kind in (GrammarKind.CHOICE, GrammarKind.EBNF) and len(grammar.text) > EXPRESSION_MAX:
        raise RequestError(
            f"the {grammar.kind.value} has {len(grammar.text):,} characters; at most {EXPRESSION_MAX:,} are compiled; "
            "make it shorter"
        )
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(grammar.text)
        case GrammarKind.JSON_OBJECT:
            return _json('{"type":"object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(text_pattern(grammar.text))
        case GrammarKind.CHOICE:
            choices = json.loads(grammar.text)
            if not choices:
                raise RequestError("the choice is empty; give at least one text")
            return LLMatcher.grammar_from_regex("|".join(map(literal_pattern, choices)))
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(lark_of(grammar.text))


def _json(schema: str) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(rewritten_schema(schema), overrides=JSON_OPTIONS)
    except ValueError as problem:
        if isinstance(problem, RequestError):
            raise
        raise RequestError(
            f"the JSON schema is refused: {str(problem)[:MESSAGE_CHARACTERS]}; make it simpler"
        ) from None


def _limits() -> LLParserLimits:
    """Returns the limits within which a grammar is compiled in some tenths of a second and a mask computed in some
    hundredths, however it was written. A request beyond them fails alone, with llguidance's name for the limit."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=100_000,
        max_grammar_size=20_000,
        max_items_in_row=10_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
