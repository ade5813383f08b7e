"""The grammar of a request's output: `Grammar`, a typed field of `SamplingParams`. Torch-free.

It holds what the client sent (a JSON schema, a regular expression, …); `structured/` checks and follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.errors import RequestError
from outrider.kv.checked import checked_fields, one_of, text


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    """`text` is the schema, as compact JSON."""
    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    REGEX = "regex"
    CHOICE = "choice"
    """`text` is a JSON list of strings, one of which is the output."""
    EBNF = "ebnf"
    """`text` is a grammar in GBNF."""


@checked_fields(RequestError)
@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        one_of(self.kind, GrammarKind, "grammar: kind", error=RequestError)
        text(self.text, "grammar: text", empty=self.kind is GrammarKind.JSON_OBJECT, error=RequestError)
