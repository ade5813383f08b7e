"""The library that compiles grammars and follows them. Imported where it is used: it takes seconds to load."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import Any

from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.matching.schemas import check_schema

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
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_schema(grammar.text)
    try:
        return _compiled(compiler, grammar)
    except Exception as problem:
        said = str(problem).strip().splitlines()
        reason = PLACE.sub("", said[-1]).rstrip(".") if said else type(problem).__name__
        raise RequestError(
            f"the {grammar.kind.value} cannot be compiled: {reason[:MESSAGE_CHARACTERS]}; correct it"
        ) from None


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            # Spaces where json.dumps puts them and nowhere else: a weak model could write spaces for ever.
            return compiler.compile_json_schema(grammar.text, any_whitespace=False)
        case GrammarKind.JSON_OBJECT:
            return compiler.compile_json_schema('{"type":"object"}', any_whitespace=False, strict_mode=False)
        case GrammarKind.REGEX:
            return compiler.compile_regex(grammar.text)
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return compiler.compile_grammar(f"root ::= {choices}")
        case GrammarKind.EBNF:
            return compiler.compile_grammar(grammar.text)
