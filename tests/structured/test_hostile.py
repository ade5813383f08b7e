"""Schemas and grammars that are made to be slow or to be enforced wrongly: refused or rewritten, within seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from outrider.errors import RequestError
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
