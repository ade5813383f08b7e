"""JSON schemas as grammars. A keyword that cannot be kept to is refused by name and place, with what to do instead.

The compiler has a translation of its own. It passes in silence over keywords that it does not know, over those beside
$ref, enum or anyOf, and over bounds beside a pattern; and it lets strings of a given length hold control characters.
An output that breaks the client's schema is worse than no output, so the translation here knows a keyword or refuses.
Where it is narrower than the schema, what it writes is still valid: properties come in the schema's order, and those
that are not listed are not written.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from outrider.errors import RequestError
from outrider.matching.ebnf import Rules, either, quoted, repeated
from outrider.matching.numbers import INTEGER, NUMBER, Bounds, integers, numbers
from outrider.matching.schema_ends import endless_reference
from outrider.matching.schema_shapes import array_expression, free_object_expression, listed_object_expression
from outrider.matching.schema_values import are_disjoint, is_one_of, literal, types_in
from outrider.matching.strings import QUOTE, any_rest, count, literal_text, string_rest

STRING_KEYWORDS = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ARRAY_KEYWORDS = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"})
OBJECT_KEYWORDS = frozenset(
    {
        *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    }
)
KEYWORDS_OF = {
    "string": STRING_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "array": ARRAY_KEYWORDS,
    "object": OBJECT_KEYWORDS,
}
HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that say all by themselves."""
ASSERTING = frozenset({"type", *HEADS}).union(*KEYWORDS_OF.values())
REFUSED = {
    "not": "describe what is allowed instead",
    **dict.fromkeys(("if", "then", "else"), "write the cases as anyOf"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "write the cases as anyOf"),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "put the item into prefixItems"),
    "uniqueItems": "leave it out and drop repeated items yourself",
    **dict.fromkeys(("contentEncoding", "contentMediaType", "contentSchema"), "write a pattern"),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "write a $ref"),
}
DEPTH_MAX = 64
RULES_MAX = 20_000
MULTIPLES_MAX = 1000


def schema_grammar(text: str) -> str:
    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        schema = json.loads(text, parse_constant=no_constant)
        json.dumps(schema, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise RequestError('the JSON schema is no JSON; send an object such as {"type": "object"}') from None
    return _Translation(schema).text()


class _Translation:
    """Every method that returns an expression raises RequestError where there can be none."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules = Rules()
        self._named: dict[str, str] = {}
        """Reference -> rule."""

    def text(self) -> str:
        root = self._expression(self._root, "the schema", 0)
        endless = endless_reference(filter(None, self._named), self._resolve)
        if endless is not None:
            raise RequestError(
                f"the schema: what $ref {endless[:80]!r} names needs itself without end; make what leads back to it "
                "optional"
            )
        return self._rules.text(root)

    # ---- one schema --------------------------------------------------------------------------------

    def _expression(self, schema: Any, where: str, depth: int) -> str:
        if schema is True:
            return self._any()
        if schema is False:
            raise RequestError(f"{where}: false allows nothing; leave it out")
        if not isinstance(schema, dict):
            raise RequestError(f"{where}: a schema is an object, or true or false, got {json.dumps(schema)[:80]}")
        if depth > DEPTH_MAX:
            raise RequestError(f"{where}: schemas are nested more than {DEPTH_MAX} deep; make it simpler")
        if len(self._rules) > RULES_MAX:
            raise RequestError(f"{where}: the schema is too large; make it simpler")
        self._check_keywords(schema, where, depth)
        for head in HEADS:
            if head in schema:
                return self._headed(head, schema, where, depth)
        types = types_in(schema, where) or self._meant(schema, where)
        if types is None:
            return self._any()
        return either([self._typed(name, schema, where, depth) for name in types])

    def _check_keywords(self, schema: dict[str, Any], where: str, depth: int) -> None:
        for name, advice in REFUSED.items():
            if name in schema and not (name == "uniqueItems" and schema[name] is False):
                raise RequestError(f"{where}: {name} cannot be kept to while text is written; {advice}")
        if depth and "$id" in schema:
            raise RequestError(f"{where}: $id inside a schema cannot be kept to; name the schema in $defs instead")
        head = next((name for name in HEADS if name in schema), None)
        if head is None:
            return
        beside = sorted((ASSERTING & schema.keys()) - {head} - ({"type"} if head in ("const", "enum") else set()))
        if beside:
            raise RequestError(
                f"{where}: {', '.join(beside)} beside {head} cannot be kept to; say all of it in one of them"
            )

    def _meant(self, schema: dict[str, Any], where: str) -> tuple[str, ...] | None:
        """The type that a schema without one speaks of."""
        kinds = [name for name, keywords in KEYWORDS_OF.items() if keywords & schema.keys()]
        if len(kinds) > 1:
            raise RequestError(f"{where}: keywords of {' and '.join(kinds)}; say which, with type")
        return tuple(kinds) or None

    def _headed(self, head: str, schema: dict[str, Any], where: str, depth: int) -> str:
        inner = schema[head]
        if head == "$ref":
            return self._reference(inner, where)
        if head == "const":
            return self._values([inner], schema, where)
        if not isinstance(inner, list) or not inner:
            raise RequestError(f"{where}: {head} is a list of at least one, got {json.dumps(inner)[:80]}")
        if head == "enum":
            return self._values(inner, schema, where)
        if head == "allOf" and len(inner) > 1:
            raise RequestError(f"{where}: allOf of several schemas cannot be kept to; write them as one")
        if head == "oneOf":
            self._check_disjoint(inner, where)
        options = [(number, each) for number, each in enumerate(inner) if each is not False]
        if not options:
            raise RequestError(f"{where}: {head} allows nothing; leave it out")
        return either([self._expression(each, f"{where}, {head} {number}", depth + 1) for number, each in options])

    def _values(self, values: list[Any], schema: dict[str, Any], where: str) -> str:
        types = types_in(schema, where)
        for value in values:
            if types is not None and not is_one_of(value, types):
                raise RequestError(
                    f"{where}: {json.dumps(value)[:60]} is not of type {' or '.join(types)}; take it out or change type"
                )
        return either([literal(value) for value in values])

    def _check_disjoint(self, options: list[Any], where: str) -> None:
        for number, second in enumerate(options):
            for earlier, first in enumerate(options[:number]):
                if not are_disjoint(first, second, self._resolve):
                    raise RequestError(
                        f"{where}, oneOf: a value might be of {earlier} and of {number}, which oneOf forbids; write "
                        "anyOf, or give each a required property with a const of its own"
                    )

    # ---- references --------------------------------------------------------------------------------

    def _reference(self, reference: Any, where: str) -> str:
        target = self._resolve(reference, where)
        if reference not in self._named:
            name = self._named[reference] = self._rules.reserve()
            self._rules.define(name, self._expression(target, f"{where}, $ref {reference[:60]!r}", 1))
        return self._named[reference]

    def _resolve(self, reference: Any, where: str = "the schema") -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise RequestError(
                f"{where}: $ref {json.dumps(reference)[:80]} leads out of the schema; put what it names into $defs and "
                "write #/$defs/name"
            )
        target = self._root
        for part in unquote(reference[2:]).split("/") if len(reference) > 2 else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise RequestError(f"{where}: $ref {reference[:80]!r} names nothing in this schema; add it to $defs")
        return target

    # ---- types -------------------------------------------------------------------------------------

    def _typed(self, name: str, schema: dict[str, Any], where: str, depth: int) -> str:
        match name:
            case "string":
                return self._rules.named(f"{QUOTE} {string_rest(self._rules, schema, where)}")
            case "integer" | "number":
                return self._rules.named(self._number(name, schema, where))
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, where, depth)
        return self._object(schema, where, depth)

    def _number(self, kind: str, schema: dict[str, Any], where: str) -> str:
        bounds = _bounds(schema, where, whole=kind == "integer")
        if "multipleOf" in schema:
            return _multiples(kind, bounds, schema["multipleOf"], where)
        if bounds.free:
            return INTEGER if kind == "integer" else NUMBER
        found = integers(bounds) if kind == "integer" else numbers(bounds)
        if found is None:
            raise RequestError(f"{where}: no {kind} is within these bounds; widen them")
        return found

    def _array(self, schema: dict[str, Any], where: str, depth: int) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", schema.get("unevaluatedItems"))
        if isinstance(rest, list):
            # Until 2020 items was what prefixItems is.
            first, rest = rest, schema.get("additionalItems")
        if not isinstance(first, list):
            raise RequestError(f"{where}: prefixItems is a list of schemas, got {json.dumps(first)[:80]}")
        if rest is None:
            # Positions that are described are enough; without any, all is allowed.
            rest = not first
        least, most = count(schema, "minItems", where) or 0, count(schema, "maxItems", where)
        prefix = [
            self._expression(each, f"{where}, prefixItems {number}", depth + 1)
            for number, each in enumerate(first[: len(first) if most is None else most])
        ]
        wanted = rest is not False and (most is None or most > len(prefix))
        others = self._rules.named(self._expression(rest, f"{where}, items", depth + 1)) if wanted else None
        return self._named_or_refused(array_expression(self._rules, prefix, others, least, most), where, "array")

    def _object(self, schema: dict[str, Any], where: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise RequestError(f"{where}: properties is an object of schemas, got {json.dumps(properties)[:80]}")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise RequestError(f"{where}: required is a list of names, got {json.dumps(required)[:80]}")
        missing = [name for name in required if name not in properties]
        if missing:
            raise RequestError(f"{where}: required {missing[0][:60]!r} is not described; add it to properties")
        least, most = count(schema, "minProperties", where) or 0, count(schema, "maxProperties", where)
        # Who lists none, and says nothing of others, means none: so functions without arguments are described.
        unsaid = "properties" not in schema or "patternProperties" in schema or "propertyNames" in schema
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", unsaid))
        if not properties:
            return self._free_object(schema, others, least, most, where, depth)
        beside: list[str] = [name for name in ("patternProperties", "propertyNames") if name in schema]
        if isinstance(others, dict) and ASSERTING & others.keys():
            beside.append("additionalProperties with a schema")
        if beside:
            raise RequestError(
                f"{where}: {beside[0]} beside properties cannot be kept to; put the others into a property of their own"
            )
        pairs = [
            (
                f'{literal(name)} ": " {self._expression(each, f"{where}, properties {name[:60]!r}", depth + 1)}',
                name in required,
            )
            for name, each in properties.items()
            if each is not False or name in required
        ]
        found = listed_object_expression(self._rules, pairs, least, most)
        return self._named_or_refused(found, where, "object")

    def _free_object(
        self, schema: dict[str, Any], others: Any, least: int, most: int | None, where: str, depth: int
    ) -> str:
        """An object of which no property is named."""
        key, patterns = any_rest(self._rules), schema.get("patternProperties")
        if patterns is not None:
            if not isinstance(patterns, dict) or len(patterns) != 1 or "propertyNames" in schema:
                raise RequestError(
                    f"{where}: patternProperties with several patterns, or beside propertyNames, cannot be kept to; "
                    "write one pattern"
                )
            if isinstance(others, dict) and ASSERTING & others.keys():
                raise RequestError(
                    f"{where}: additionalProperties with a schema beside patternProperties cannot be kept to; set it "
                    "to false"
                )
            ((pattern, others),) = patterns.items()
            key = string_rest(self._rules, {"pattern": pattern}, f"{where}, patternProperties")
        elif "propertyNames" in schema and schema["propertyNames"] is not True:
            key = self._key(schema["propertyNames"], f"{where}, propertyNames")
        if least > 1:
            # A property that is written twice counts once.
            raise RequestError(f"{where}: minProperties above 1 without properties cannot be kept to; name them")
        if others is False or most == 0:
            return self._named_or_refused(None if least else '"{}"', where, "object")
        value = self._expression(others, f"{where}, properties", depth + 1)
        pair = self._rules.named(f'{QUOTE} {key} ": " {value}')
        return self._named_or_refused(free_object_expression(pair, least, most), where, "object")

    def _key(self, schema: Any, where: str) -> str:
        if not isinstance(schema, dict) or schema.get("type", "string") != "string":
            raise RequestError(f"{where}: names of properties are strings; describe one with pattern or enum")
        self._check_keywords(schema, where, 1)
        if "$ref" in schema:
            return self._key(self._resolve(schema["$ref"], where), where)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            if not isinstance(values, list) or not values or not all(isinstance(name, str) for name in values):
                raise RequestError(f"{where}: names of properties are strings; list some")
            return f"{either([literal_text(name) for name in values])} {QUOTE}"
        if any(head in schema for head in HEADS):
            raise RequestError(f"{where}: anyOf and its kin cannot be kept to in names; write one pattern")
        return string_rest(self._rules, schema, where)

    def _any(self) -> str:
        if "" not in self._named:
            name = self._named[""] = self._rules.reserve()
            text = self._rules.named(f"{QUOTE} {any_rest(self._rules)}")
            number = self._rules.named(NUMBER)
            array = repeated(f'{name} (", " {name})*', 0, 1)
            members = repeated(f'{text} ": " {name} (", " {text} ": " {name})*', 0, 1)
            self._rules.define(
                name, f'{text} | {number} | "true" | "false" | "null" | "[" {array} "]" | "{{" {members} "}}"'
            )
        return self._named[""]

    def _named_or_refused(self, expression: str | None, where: str, what: str) -> str:
        if expression is None:
            raise RequestError(f"{where}: no {what} has as few and as many as are asked for; change the numbers")
        return self._rules.named(expression)


def _bounds(schema: dict[str, Any], where: str, *, whole: bool) -> Bounds:
    found: dict[str, Decimal] = {}
    for name in NUMBER_KEYWORDS & schema.keys():
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            raise RequestError(f"{where}: {name} is a number up to 1e300, got {json.dumps(value)[:60]}")
        found[name] = Decimal(repr(value))
    least, most = found.get("minimum"), found.get("maximum")
    over, under = found.get("exclusiveMinimum"), found.get("exclusiveMaximum")
    above = over is not None and (least is None or over >= least)
    below = under is not None and (most is None or under <= most)
    bounds = Bounds(least=over if above else least, most=under if below else most, above=above, below=below)
    return _whole(bounds) if whole else bounds


def _whole(bounds: Bounds) -> Bounds:
    """The whole numbers within bounds, both ends included."""
    least, most = bounds.least, bounds.most
    if least is not None:
        floor = Decimal(least.__floor__())
        least = floor + 1 if bounds.above or floor != least else floor
    if most is not None:
        ceiling = Decimal(most.__ceil__())
        most = ceiling - 1 if bounds.below or ceiling != most else ceiling
    return Bounds(least=least, most=most)


def _multiples(kind: str, bounds: Bounds, step: Any, where: str) -> str:
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < 1e300:
        raise RequestError(f"{where}: multipleOf is a number above 0, got {json.dumps(step)[:60]}")
    each = Decimal(repr(step))
    if bounds.least is None or bounds.most is None or (bounds.most - bounds.least) / each > MULTIPLES_MAX:
        raise RequestError(
            f"{where}: multipleOf can be kept to where minimum and maximum leave at most {MULTIPLES_MAX} values; add "
            "them, or leave it out and round the value yourself"
        )
    first = int((bounds.least / each).__ceil__())
    values = [each * number for number in range(first, first + MULTIPLES_MAX + 2)]
    inside = [
        value
        for value in values
        if value <= bounds.most
        and not (bounds.above and value == bounds.least)
        and not (bounds.below and value == bounds.most)
        and (kind == "number" or value == value.to_integral_value())
    ]
    if not inside:
        raise RequestError(f"{where}: no multiple of {step} is within the bounds; widen them")
    return either([quoted(f"{value:f}") for value in inside])
