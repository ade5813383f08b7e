"""Schemas and grammars that are made to be slow or to be enforced wrongly: refused or rewritten, within seconds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from tests.structured.byte_tokens import accepts, of_schema, random_text

from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.structured.grammars import native_definition
from outrider.structured.patterns import EXPRESSION_MAX
from outrider.structured.schema_values import as_llguidance_reads
from outrider.structured.schemas import rewritten_schema

SLOW = """
import json, sys
from outrider.errors import RequestError
from outrider.structured.gbnf import lark_of
from outrider.structured.schemas import rewritten_schema

wide = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 12} for i in range(9)}
many_paths = {"oneOf": [{"$ref": "#/$defs/a0"}, {"type": "null"}], "$defs": {**wide, "a9": {"type": "string"}}}
nested = {"type": "string"}
for _ in range(6):
    nulls = {name: {"type": "null"} for name in "bcdefgh"}
    nested = {"type": "object", "properties": {"a": nested, **nulls}, "maxProperties": 4}
listed = {"oneOf": [{"const": f"v{i}"} for i in range(1500)]}
for schema in (many_paths, nested, listed):
    try:
        print(len(json.dumps(rewritten_schema(json.dumps(schema)))))
    except RequestError as refusal:
        print(refusal)
for endless in ("[" * 60_000, '"\\\\' * 30_000, "[a\\\\" * 20_000):
    try:
        lark_of('root ::= "a"\\n' + endless)
    except RequestError as refusal:
        print(refusal)
"""


def test_work_does_not_explode() -> None:
    # The limit stands for "for ever": each of these took more than fifteen seconds, or would not have ended at all.
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=60, check=True)
    many_paths, nested, listed, *grammars = done.stdout.splitlines()
    assert "might match both 0 and 1" in many_paths
    assert int(nested) < 500_000
    assert int(listed) < 100_000
    assert len(grammars) == 3
    assert all("is not closed" in refusal for refusal in grammars)


def refusal_of(text: str) -> str:
    with pytest.raises(RequestError) as refused:
        rewritten_schema(text)
    return str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "array", "minItems": 1e400}',
        '{"type": "string", "maxLength": -1e400}',
        '{"type": "number", "const": 1e400}',
        '{"const": 1e400}',
        '{"enum": [[1e999]]}',
    ],
)
def test_numbers_that_no_double_holds_are_refused(text: str) -> None:
    assert "no double can hold" in refusal_of(text)


def test_numbers_that_would_be_rounded_are_refused() -> None:
    bounds = {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}
    assert "no integer that can be written" in refusal_of(json.dumps(bounds))
    assert "would be rounded" in refusal_of('{"enum": [0.1, 1e-07, 123456789.12345679]}')
    assert "would be rounded" in refusal_of('{"const": {"a": [123456789.12345679]}}')
    assert "would be rounded" in refusal_of(json.dumps({"const": 2**53 + 1}))
    assert rewritten_schema(json.dumps({"const": 2**53}))["enum"] == [2**53]
    kept = [0.1, -1e-07, 12345678.9012345, 0.30000000000000004, 1e300]
    assert rewritten_schema(json.dumps({"enum": kept}))["enum"] == kept


@pytest.mark.parametrize(
    ("least", "most", "written"),
    [
        (None, None, (-(10**18), 10**18)),
        (2**53 + 1, 10**18 - 1, (2**53 + 2, 10**18 - 128)),
        (-(10**18) + 1, -(2**53) - 1, (-(10**18) + 128, -(2**53) - 2)),
        (2**53 - 1, 2**53, (2**53 - 1, 2**53)),
    ],
)
def test_bounds_of_integers_are_numbers_that_doubles_hold(
    least: int | None, most: int | None, written: tuple[int, int]
) -> None:
    bounds = {} if least is None else {"minimum": least, "maximum": most}
    found = rewritten_schema(json.dumps({"type": "integer", **bounds}))
    assert (found["minimum"], found["maximum"]) == written


def test_an_excluded_end_counts_where_it_equals_the_included_one() -> None:
    written = rewritten_schema('{"type": "integer", "minimum": 1, "maximum": 5, "exclusiveMaximum": 5}')
    assert (written["minimum"], written["maximum"]) == (1, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [([1], [1.0]), ({"a": 1}, {"a": 1.0}), ({"a": [{"b": 2}]}, {"a": [{"b": 2.0}]}), (1, 1.0)],
)
def test_equal_values_are_not_taken_for_different_ones(one: Any, other: Any) -> None:
    assert "might match both" in refusal_of(json.dumps({"oneOf": [{"const": one}, {"const": other}]}))
    tagged = [{"type": "object", "properties": {"t": {"const": value}}, "required": ["t"]} for value in (one, other)]
    assert "might match both" in refusal_of(json.dumps({"oneOf": tagged}))


def test_a_reference_through_another_document_is_refused() -> None:
    inner = {"$id": "http://x/a", "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"type": "integer"}}}
    schema = {"$ref": "#/$defs/a/$defs/b", "$defs": {"a": inner, "c": {"type": "boolean"}}}
    assert "leads through an $id" in refusal_of(json.dumps(schema))


def test_a_reference_may_name_the_empty_key_or_pass_a_property_called_id() -> None:
    assert rewritten_schema('{"$ref": "#/", "": {"type": "null"}}')["$defs"]["0"] == {"type": "null"}
    properties = {"$id": {"type": "string"}, "b": {"type": "null"}}
    schema = {"type": "object", "properties": {**properties, "c": {"$ref": "#/properties/b"}}}
    assert rewritten_schema(json.dumps(schema))["$defs"]["0"] == {"type": "null"}


@pytest.mark.parametrize("bound", [123456789.12345679, 987654321.98765433, 0.1, 31415926.535897933])
def test_bounds_of_numbers_are_not_read_as_wider_ones(bound: float) -> None:
    written = rewritten_schema(json.dumps({"type": "number", "minimum": bound, "maximum": bound + 1}))
    assert as_llguidance_reads(float(written["minimum"])) >= bound
    written = rewritten_schema(json.dumps({"type": "number", "minimum": bound - 1, "maximum": bound}))
    assert as_llguidance_reads(float(written["maximum"])) <= bound


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        # Each is a mistake from its second character on, so that an error about its length comes before any work.
        (GrammarKind.REGEX, "a)" + "a" * EXPRESSION_MAX),
        (GrammarKind.CHOICE, '["' + "a" * EXPRESSION_MAX),
        (GrammarKind.EBNF, '"' * (EXPRESSION_MAX + 1)),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "a)" + "a" * EXPRESSION_MAX})),
    ],
)
def test_what_is_too_long_is_refused_before_it_is_read(kind: GrammarKind, text: str) -> None:
    with pytest.raises(RequestError, match=f"at most {EXPRESSION_MAX:,} are compiled; make it shorter"):
        native_definition(Grammar(kind=kind, text=text))


def test_what_is_just_short_enough_is_compiled() -> None:
    assert native_definition(Grammar(kind=GrammarKind.REGEX, text="a" * EXPRESSION_MAX))
    assert native_definition(Grammar(kind=GrammarKind.CHOICE, text=json.dumps(["a" * (EXPRESSION_MAX - 4)])))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99991, "minimum": -(10**18), "maximum": 10**18},
        {"type": "integer", "multipleOf": 3**15},
        {"type": "integer", "multipleOf": 1001, "minimum": 0, "maximum": 1001 * 1000},
        {"type": "integer", "multipleOf": 10000.5},
        {"type": "number", "multipleOf": 99991.5},
    ],
)
def test_multiples_that_would_fail_while_they_are_written_are_refused(schema: Any) -> None:
    assert "has too many remainders to follow; choose" in refusal_of(json.dumps(schema))


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_few_multiples_of_a_large_number_are_all_allowed(kind: str) -> None:
    grammar = of_schema({"type": kind, "multipleOf": 9973, "exclusiveMinimum": -9973, "maximum": 9973 * 999})
    rng = random.Random(0)
    assert all(int(random_text(grammar, rng) or "0") % 9973 == 0 for _ in range(20))
    assert all(accepts(grammar, str(9973 * number)) for number in (0, 1, 500, 999))
    assert not any(accepts(grammar, text) for text in ("-9973", "9974", str(9973 * 1000)))


@pytest.mark.parametrize("step", [1000, 937])
def test_multiples_of_small_numbers_are_followed_to_the_end(step: int) -> None:
    grammar = of_schema({"type": "number", "multipleOf": step})
    rng = random.Random(0)
    texts = [random_text(grammar, rng) for _ in range(20)]
    assert all(text is not None and int(text) % step == 0 for text in texts)
    assert accepts(grammar, str(step * 12345678901))
    assert not accepts(grammar, str(step * 12345678901 + 1))


def test_integers_among_the_multiples_of_a_fraction() -> None:
    grammar = of_schema({"type": "integer", "multipleOf": 1.5, "minimum": 0, "maximum": 12})
    assert [number for number in range(20) if accepts(grammar, str(number))] == [0, 3, 6, 9, 12]


def test_the_depths_of_all_definitions_are_limited_together() -> None:
    def of_definitions(number: int) -> dict[str, Any]:
        listed = {f"d{i}": {"items": {"items": {"type": "null"}}} for i in range(number)}
        return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in listed], "$defs": listed}

    # Each is four deep: the names of types count as well.
    assert len(rewritten_schema(json.dumps(of_definitions(250)))["$defs"]) == 250
    assert "too many definitions" in refusal_of(json.dumps(of_definitions(251)))


def test_properties_that_are_counted_are_definitions_too() -> None:
    def counted(objects: int) -> dict[str, Any]:
        properties = {f"p{i}": {"type": "null"} for i in range(10)}
        return {"anyOf": [{"type": "object", "properties": properties, "maxProperties": 1} for _ in range(objects)]}

    assert len(rewritten_schema(json.dumps(counted(50)))["$defs"]) == 500
    assert "too many definitions" in refusal_of(json.dumps(counted(51)))
