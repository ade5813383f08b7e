"""The library that compiles grammars and follows them. Imported where it is used: it takes seconds to load."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import Any

from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.matching.ebnf import either, quoted
from outrider.matching.patterns import text_pattern
from outrider.matching.schemas import schema_grammar

LIBRARY = "xgrammar"
MESSAGE_CHARACTERS = 300
PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""In the library's own source, which its messages begin with."""


def is_installed() -> bool:
    return find_spec(LIBRARY) is not None


def native_tokens(spelling: list[bytes], eos_ids: tuple[int, ...]) -> Any:
    import xgrammar

    return xgrammar.TokenizerInfo(
        spelling, xgrammar.VocabType.RAW, vocab_size=len(spelling), stop_token_ids=list(eos_ids)
    )


def compile_grammar(compiler: Any, grammar: Grammar) -> Any:
    """The compiled grammar, or RequestError with what is wrong."""
    text = _ebnf(grammar)
    try:
        return compiler.compile_grammar(text)
    except Exception as problem:
        said = str(problem).strip().splitlines()
        reason = PLACE.sub("", said[-1]).rstrip(".") if said else type(problem).__name__
        raise RequestError(
            f"the {grammar.kind.value} cannot be compiled: {reason[:MESSAGE_CHARACTERS]}; correct it"
        ) from None


def _ebnf(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return schema_grammar(grammar.text)
        case GrammarKind.JSON_OBJECT:
            return schema_grammar('{"type":"object"}')
        case GrammarKind.REGEX:
            return f"root ::= {text_pattern(grammar.text)}"
        case GrammarKind.CHOICE:
            choices = json.loads(grammar.text)
            if not choices:
                raise RequestError("the choice is empty; give at least one text")
            return f"root ::= {either([quoted(choice) for choice in choices])}"
        case GrammarKind.EBNF:
            return grammar.text
