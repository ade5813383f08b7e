"""Each keyword of JSON Schema is kept to, or refused by name; nothing is passed over."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from tests.structured.byte_tokens import accepts, of_schema, random_text

from outrider.errors import RequestError
from outrider.structured.schemas import rewritten_schema

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10, 15, 100, 1.5, 0.1, -2.25, 0.30000000000000004, 1000000),
    *("", "a", "ab", "abc", "abcd", "x1", "2020-02-29", "2021-02-29", "2020-04-31", "é", '"', "\\", "\n", "🙂"),
    *([], [1], [1, 1], [1, 2], ["a"], [1, "a"], [1, 2, 3], [[1]], [None, None]),
    *({}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"ab": 1}, {"a": None}),
    *({"c": "x"}, {"kind": "cat"}, {"kind": "dog", "a": 1}, {"a": {"a": {}}}),
)
NODE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x~1y"}}}
KEPT: dict[str, list[Any]] = {
    "type": [{"type": name} for name in ("string", "integer", "number", "boolean", "null", "array", "object")]
    + [{"type": ["string", "integer"], "minLength": 2, "minimum": 2}, {"type": "object", "description": "x"}],
    "enum": [{"enum": [1, "a", None, 1.5, [1, 2], {"a": 1}, '"']}, {"type": ["string", "null"], "enum": ["é", None]}],
    "const": [
        {"const": {"a": 1}},
        {"const": "\n"},
        {"type": "number", "const": 1.5},
        {"const": -(2**53)},
        {"enum": [1e22, 1e-7, 0.30000000000000004, 5e-324]},
    ],
    "minLength": [{"type": "string", "minLength": 2}, {"minLength": 1}],
    "maxLength": [{"type": "string", "maxLength": 1}, {"maxLength": 0}, {"minLength": 2, "maxLength": 3}]
    + [{"type": "string", "maxLength": 1000}, {"type": "string", "minLength": 129}],
    "pattern": [{"pattern": "^ab"}, {"type": "string", "pattern": "^[^a]{1,2}$"}, {"pattern": '^["\\\\\\n]$'}]
    + [{"type": "string", "pattern": "^[ -~]{0,5}$"}, {"type": "string", "pattern": ""}, {"pattern": '^[^"]{1,3}$'}]
    + [{"pattern": r"^[\x00-\x1f]{1,3}$"}, {"pattern": "^[ab]*$", "minLength": 2, "maxLength": 4}]
    + [{"format": "date", "pattern": r"^2\d{3}-0.*$", "maxLength": 10}],
    "format": [
        {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
        + ("uri-reference", "json-pointer", "relative-json-pointer")
    ]
    + [{"type": "integer", "format": "int64"}],
    "minimum": [{"type": "integer", "minimum": 2}, {"minimum": 1.5}, {"type": "integer", "minimum": -3.5}]
    + [{"type": "number", "minimum": 0.25, "maximum": 0.75}, {"type": "number", "minimum": 1e-9, "maximum": 2e-9}],
    "maximum": [
        {"type": "integer", "maximum": 2},
        {"maximum": -0.5},
        {"type": "integer", "minimum": -17, "maximum": 99},
    ]
    + [{"type": "number", "maximum": 10}, {"type": "integer", "maximum": 10**30}],
    "exclusiveMinimum": [{"type": "integer", "exclusiveMinimum": 2}, {"type": "number", "exclusiveMinimum": 0}]
    + [
        {"type": "number", "minimum": 3, "exclusiveMinimum": 3},
        {"type": "number", "minimum": 5, "exclusiveMinimum": 3},
    ],
    "exclusiveMaximum": [{"type": "integer", "exclusiveMaximum": 2}, {"type": "number", "exclusiveMaximum": 1.5}]
    + [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001}],
    "multipleOf": [{"type": "integer", "multipleOf": 5, "minimum": -10, "maximum": 100}]
    + [{"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0, "maximum": 2}, {"multipleOf": 0.1}]
    + [{"type": "integer", "multipleOf": 7}, {"type": "number", "multipleOf": 1.5, "maximum": 0}],
    "items": [{"type": "array", "items": {"type": "integer"}}, {"items": {"type": "string"}}, {"items": False}],
    "prefixItems": [{"prefixItems": [{"type": "integer"}, {"type": "string"}]}]
    + [{"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 1, "maxItems": 3}],
    "minItems": [{"type": "array", "minItems": 2}, {"prefixItems": [True, True], "minItems": 2, "items": True}],
    "maxItems": [{"type": "array", "maxItems": 1}, {"prefixItems": [True, True], "maxItems": 1}],
    "unevaluatedItems": [{"type": "array", "unevaluatedItems": {"type": "integer"}}, {"unevaluatedItems": False}],
    "properties": [{"properties": {"a": {"type": "integer"}, "b": {}}}, {"properties": {"a": False, "b": True}}],
    "required": [{"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]}],
    "additionalProperties": [{"additionalProperties": {"type": "integer"}}, {"additionalProperties": False}]
    + [{"properties": {"a": {"type": "integer"}}, "additionalProperties": value} for value in (True, False, {})],
    "unevaluatedProperties": [{"unevaluatedProperties": False}, {"unevaluatedProperties": {"type": "string"}}],
    "patternProperties": [{"type": "object", "patternProperties": {"^[ab]{1,2}$": {"type": "integer"}}}]
    + [{"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False, "minProperties": 1}],
    "propertyNames": [{"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, {"propertyNames": {"maxLength": 1}}]
    + [{"propertyNames": {"enum": ["a", '"']}, "additionalProperties": {"type": "integer"}}]
    + [{"propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"const": "a"}}}],
    "minProperties": [{"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, {"minProperties": 1}],
    "maxProperties": [{"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1}, {"maxProperties": 1}]
    + [{"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"], "minProperties": 2, "maxProperties": 2}],
    "anyOf": [{"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}, False]}],
    "oneOf": [{"oneOf": [{"type": "integer"}, {"type": "string"}, {"enum": [None, True]}]}]
    + [
        {
            "oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}],
            "$defs": {
                name[0]: {"type": "object", "properties": {"kind": {"const": name}, "a": {}}, "required": ["kind"]}
                for name in ("cat", "dog")
            },
        }
    ],
    "allOf": [{"allOf": [{"type": "integer"}]}],
    "$ref": [{"$ref": "#/$defs/x~1y", "$defs": {"x/y": NODE}}, {"type": "array", "items": {"$ref": "#"}}]
    + [{"$ref": "#/definitions/a%20b", "definitions": {"a b": {"type": "integer"}}}]
    + [{"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}],
}
REFUSED: dict[str, Any] = {
    "not": {"type": "integer", "not": {"const": 1}},
    "if": {"if": {"type": "string"}},
    "then": {"then": {"minLength": 2}},
    "else": {"else": {"minLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "minContains": {"type": "array", "minContains": 2},
    "maxContains": {"type": "array", "maxContains": 1},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "contentMediaType": {"type": "string", "contentMediaType": "text/html"},
    "contentSchema": {"type": "string", "contentSchema": {}},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$recursiveRef": {"$recursiveRef": "#"},
}
ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
    *("$id", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions", "additionalItems"),
)


def test_every_keyword_of_the_standard_is_in_a_table() -> None:
    known = {*KEPT, *REFUSED, *ANNOTATIONS}
    standard = (
        "$id $schema $ref $anchor $dynamicRef $dynamicAnchor $vocabulary $comment $defs prefixItems items contains "
        "additionalProperties properties patternProperties dependentSchemas propertyNames if then else allOf anyOf "
        "oneOf not unevaluatedItems unevaluatedProperties type const enum multipleOf maximum exclusiveMaximum minimum "
        "exclusiveMinimum maxLength minLength pattern maxItems minItems uniqueItems maxContains minContains "
        "maxProperties minProperties required dependentRequired format contentEncoding contentMediaType contentSchema "
        "title description default deprecated readOnly writeOnly examples definitions dependencies additionalItems "
        "$recursiveRef"
    )
    assert set(standard.split()) == known


@pytest.mark.parametrize("keyword", KEPT)
def test_a_keyword_is_kept_to(keyword: str) -> None:
    for number, schema in enumerate(KEPT[keyword]):
        grammar = of_schema(schema)
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        written = [value for value in VALUES if accepts(grammar, json.dumps(value, ensure_ascii=False))]
        assert [value for value in written if not validator.is_valid(value)] == [], schema
        rng, ended = random.Random(number), 0
        for _ in range(40):
            text = random_text(grammar, rng)
            if text is not None:
                ended += 1
                # A number without bounds may be too large for Python.
                assert "inf" in str(value := json.loads(text)) or validator.is_valid(value), (schema, text)
        assert ended > 0 or schema.get("minLength") == 129, schema


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "string"}, ['"a\\"\\\\\\n\\t é🙂"', '""']),
        ({"type": "string", "maxLength": 3}, ['"abc"', '"\\n\\"é"']),
        ({"type": "number"}, ["0", "-0.5", "6.02e23", "1E-9", "12345678901234567890"]),
        ({"type": "number", "minimum": 0.25, "maximum": 12.5}, ["0.25", "0.250", "0.3", "1", "9.99", "12.5"]),
        ({"type": "integer", "minimum": -17, "maximum": 2345}, ["-17", "-9", "0", "99", "1999", "2345"]),
        ({"type": "integer", "minimum": 7}, ["7", "10", "987654321098765432"]),
        ({"type": "array", "minItems": 2, "maxItems": 3}, ["[1, {}]", '[null, [[]], "a"]']),
        ({"type": "object"}, ["{}", '{"a": {"b": [1, true]}, "": null}']),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]}, ['{"a": 1, "b": 2, "c": 3}', '{"b": 0}']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"']),
        ({"type": "string", "format": "email"}, ['"ada.lovelace@example.org"']),
        ({"type": "string", "format": "uri"}, ['"https://example.org/a/b.html?x=1#top"']),
        ({"type": "string", "format": "ipv6"}, ['"2001:db8::1"', '"::"', '"1:2:3:4:5:6:7:8"']),
        ({"type": "string", "format": "duration"}, ['"P1Y2M3D"', '"PT5M"', '"P3W"']),
    ],
)
def test_what_people_write_is_possible(schema: Any, texts: list[str]) -> None:
    grammar = of_schema(schema)
    assert [text for text in texts if not accepts(grammar, text)] == []


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_a_keyword_that_cannot_be_kept_to_is_refused_by_name(keyword: str, inside: bool) -> None:
    schema = {"properties": {"in": {"items": {"anyOf": [REFUSED[keyword]]}}}} if inside else REFUSED[keyword]
    with pytest.raises(RequestError) as refusal:
        of_schema(schema)
    assert f"{keyword} cannot be enforced" in str(refusal.value)
    assert ("properties 'in', items, anyOf 0" in str(refusal.value)) == inside
    assert str(refusal.value).count(";") == 1, "it says what to do"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}, "maxLength": 1}, "maxLength beside $ref"),
        ({"const": 1, "minimum": 2}, "minimum beside const"),
        ({"enum": ["a"], "minLength": 2}, "minLength beside enum"),
        ({"type": "string", "anyOf": [{"type": "string"}]}, "type beside anyOf"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "properties beside anyOf"),
        ({"oneOf": [{"type": "string"}], "maxLength": 1}, "maxLength beside oneOf"),
        ({"allOf": [{"type": "string"}], "maxLength": 1}, "maxLength beside allOf"),
        ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, "allOf with several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "might match both 0 and 1"),
        ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "might match both 0 and 1"),
        ({"type": "string", "format": "idn-email"}, "format 'idn-email' cannot be enforced"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "enum": ["a", 1]}, "1 is not of type string"),
        ({"minLength": 2, "minimum": 3}, "say which is meant, with type"),
        ({"required": ["a"]}, "required 'a' is not described"),
        ({"properties": {"a": {}}, "patternProperties": {"a": {}}}, "patternProperties beside properties"),
        ({"properties": {"a": {}}, "propertyNames": {"maxLength": 1}}, "propertyNames beside properties"),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, "additionalProperties with a schema"),
        ({"patternProperties": {"a": {}, "b": {}}}, "several patterns"),
        ({"type": "object", "minProperties": 2}, "minProperties above 1"),
        ({"$ref": "http://example.org/schema"}, "leads out of the schema"),
        ({"$ref": "#/$defs/x"}, "names nothing"),
        ({"properties": {"a": {"$id": "http://example.org/x"}}}, "$id inside"),
        ({"enum": []}, "enum is a list of at least one"),
        ({"anyOf": []}, "anyOf is a list of at least one"),
        ({"type": "objct"}, "objct"),
        ({"type": []}, "type [] is unknown"),
        ({"properties": {"a": 7}}, "a schema is an object"),
        ({"properties": []}, "properties is an object"),
        ({"type": "string", "maxLength": -1}, "maxLength is a whole number"),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum is a number"),
        ({"type": "integer", "required": True}, "required is a list of names"),
        ({"properties": {"a": {"type": "string", "required": False}}}, "properties 'a': required is a list of names"),
        ({"type": "object", "required": "a"}, "required is a list of names"),
        ({"const": 1, "required": [1]}, "required is a list of names"),
    ],
)
def test_what_would_be_half_kept_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        of_schema(schema)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"anyOf": [False]},
        {"$ref": "#"},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "number", "minimum": 1, "exclusiveMaximum": 1},
        {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
        {"type": "number", "multipleOf": 7, "exclusiveMinimum": 0, "maximum": 6},
        {"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 99990},
        {"type": "integer", "multipleOf": 99991, "minimum": 10**17, "maximum": 10**17 + 10**6},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "array", "minItems": 1, "items": False},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "maxProperties": 1},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {
            "$ref": "#/$defs/x",
            "$defs": {
                "x": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]},
                "y": {"type": "array", "prefixItems": [{"$ref": "#/$defs/x"}], "minItems": 1},
            },
        },
    ],
)
def test_a_schema_that_nothing_fulfils_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        of_schema(schema)


def test_an_object_of_no_properties_is_empty() -> None:
    grammar = of_schema({"type": "object", "properties": {}})
    assert accepts(grammar, "{}")
    assert not accepts(grammar, '{"a": 1}')
    assert accepts(of_schema({"type": "object", "properties": {}, "additionalProperties": True}), '{"a": 1}')


def test_annotations_change_nothing() -> None:
    plain = {"type": "string", "maxLength": 3}
    noted = {**plain, "title": "t", "description": "d", "default": "x", "examples": [1], "x-internal": True}
    assert rewritten_schema(json.dumps(noted)) == rewritten_schema(json.dumps(plain))


def test_a_property_written_twice_or_escaped_cannot_get_round_its_schema() -> None:
    for others in (True, False, {}):
        grammar = of_schema({"properties": {"a": {"type": "integer"}}, "additionalProperties": others})
        for text in ('{"a": 1, "a": "x"}', '{"\\u0061": "x"}', '{"a": "x"}'):
            assert not accepts(grammar, text)


def test_schemas_that_lead_back_to_themselves_end_where_they_may() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "value": {"type": "integer"}},
        "required": ["value"],
    }
    grammar = of_schema(tree)
    assert accepts(grammar, '{"left": {"left": {"value": 3}, "value": 2}, "value": 1}')
    assert not accepts(grammar, '{"left": {"left": {}, "value": 2}, "value": 1}')


@pytest.mark.parametrize("text", ["{", "[1", '{"minimum": NaN}', '{"const": "\\ud800"}', "[" * 5000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        rewritten_schema(text)


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested more than 40 deep"):
        of_schema(schema)
