"""Turns the several ways in which a client can ask for structured output into one typed `Grammar`."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from outrider.grammar import Grammar, GrammarKind
from outrider.server.config import ServerConfig
from outrider.server.front.problems import Problem
from outrider.server.protocol.fields import GenerationFields, ResponseFormat


def grammar_of(body: GenerationFields, config: ServerConfig) -> Grammar | None:
    found = [(name, grammar) for name, grammar in _asked_for(body) if grammar is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise Problem(f"structured output is asked for more than once: {names}; give one of them", param=found[1][0])
    if not found:
        return None
    name, grammar = found[0]
    check_size(grammar, config, param=name)
    return grammar


def check_size(grammar: Grammar, config: ServerConfig, *, param: str) -> None:
    size = len(grammar.text.encode())
    if size > config.grammar_bytes_max:
        raise Problem(
            f"{param}: the {grammar.kind.value} has {size:,} bytes, more than {config.grammar_bytes_max:,}; make it "
            "simpler",
            param=param,
            code="grammar_too_large",
        )


def json_schema(schema: object, *, param: str) -> Grammar:
    """Returns the grammar of a schema, given as an object or as its text."""
    if isinstance(schema, str):
        try:
            # As strictly as bodies are read: Python's own reader lets through what cannot be sent on.
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise Problem(f"{param}: the schema is not valid JSON; correct it", param=param) from None
    if not isinstance(schema, dict | bool):
        raise Problem(f"{param}: a schema is an object, or true; correct it", param=param)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema, separators=(",", ":"), ensure_ascii=False))


def _asked_for(body: GenerationFields) -> list[tuple[str, Grammar | None]]:
    structured = body.structured_outputs
    asked: list[tuple[str, Grammar | None]] = [("response_format", _response_format(body.response_format))]
    for prefix, json_, regex, choice, ebnf in (
        ("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar),
        *(
            [("structured_outputs.", structured.json_, structured.regex, structured.choice, structured.grammar)]
            if structured is not None
            else []
        ),
    ):
        asked.append((f"{prefix}json", None if json_ is None else json_schema(json_, param=f"{prefix}json")))
        asked.append((f"{prefix}regex", _text(GrammarKind.REGEX, regex, f"{prefix}regex")))
        asked.append((f"{prefix}choice", _choice(choice, f"{prefix}choice")))
        asked.append((f"{prefix}grammar", _text(GrammarKind.EBNF, ebnf, f"{prefix}grammar")))
    if structured is not None and structured.json_object:
        asked.append(("structured_outputs.json_object", Grammar(kind=GrammarKind.JSON_OBJECT)))
    return asked


def _response_format(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    schema: Any = None if wanted.json_schema is None else wanted.json_schema.schema_
    if schema is None:
        raise Problem("response_format: json_schema needs a schema; add json_schema.schema", param="response_format")
    return json_schema(schema, param="response_format")


def _text(kind: GrammarKind, text: str | None, param: str) -> Grammar | None:
    if text is None:
        return None
    if not text:
        raise Problem(f"{param} is empty; leave it out", param=param)
    return Grammar(kind=kind, text=text)


def _choice(choices: list[str] | None, param: str) -> Grammar | None:
    if choices is None:
        return None
    if not choices or "" in choices:
        raise Problem(f"{param}: give at least one choice, and no empty one", param=param)
    return Grammar(kind=GrammarKind.CHOICE, text=json.dumps(choices, ensure_ascii=False))
