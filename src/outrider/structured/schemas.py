"""JSON schemas, checked and rewritten before llguidance compiles them.

llguidance ignores keywords that it does not know, and enforces some of those that it knows only in part. Output that
violates the client's schema is worse than none, so a schema is rebuilt from keywords that are known to be enforced;
everything else is refused by name and place, with what to do instead. Where the rebuilt schema is narrower, its
output is still valid: properties come in the schema's order, and properties that are not listed are not written.

    original schema ── SchemaWriter ──▶ { "$defs": {"0": …, "1": …}, … }    annotations and extensions are gone
"""

from __future__ import annotations

import json
from itertools import combinations
from math import comb, isfinite
from typing import Any, TypeAlias
from urllib.parse import unquote

from outrider.errors import RequestError
from outrider.structured.formats import FORMATS
from outrider.structured.patterns import character_class, json_pattern, literal_pattern
from outrider.structured.schema_ends import endless_definitions
from outrider.structured.schema_numbers import NUMBER_KEYWORDS, written_number
from outrider.structured.schema_values import check_exact, count, first_overlap, is_one_of, types_in

Schema: TypeAlias = dict[str, Any]

KEYWORDS_OF = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": NUMBER_KEYWORDS,
    "array": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"}
    | {"propertyNames", "minProperties", "maxProperties"},
}
HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that describe a value completely; others beside them are refused."""
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
DEPTH_MAX = 40
"""How deep schemas may nest. llguidance's JSON reader stops at 128 brackets, three for each schema."""
LEVELS_MAX = 1000
"""The sum of the depths of all definitions. llguidance compiles recursively, and a stack overflow ends the process."""
LENGTH_MAX = 100_000
CASES_MAX = 256
"""How many objects with fixed sets of properties may stand for one with minProperties or maxProperties."""


def rewritten_schema(text: str) -> Schema:
    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(digits: str) -> float:
        if not isfinite(value := float(digits)):
            raise RequestError(f"the JSON schema has the number {digits[:60]}, which no double can hold; write less")
        return value

    try:
        schema = json.loads(text, parse_constant=no_constant, parse_float=finite)
        json.dumps(schema, ensure_ascii=False).encode()
    except RequestError:
        raise
    except (ValueError, RecursionError):
        raise RequestError('the JSON schema is not valid JSON; send an object such as {"type": "object"}') from None
    try:
        return _Writer(schema).written()
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply; make it simpler") from None


class _Writer:
    """Rewrites one document. Methods raise RequestError for a schema that cannot be enforced or that allows nothing."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._definitions: dict[str, Schema] = {}
        """The rewritten schema of each reference, in the order in which they were met."""
        self._levels = 0

    def written(self) -> Schema:
        schema = self._schema(self._root, "the schema", 0)
        definitions = list(self._definitions.values())
        for number in endless_definitions(definitions):
            raise RequestError(
                f"the schema: $ref {list(self._definitions)[number][:80]!r} describes a value that contains itself "
                "without end; make what leads back to it optional"
            )
        return {**schema, "$defs": {str(number): each for number, each in enumerate(definitions)}}

    # ---- one schema --------------------------------------------------------------------------------

    def _schema(self, schema: Any, where: str, depth: int) -> Schema:
        if schema is True:
            return {}
        if schema is False:
            raise RequestError(f"{where}: false allows no value; leave it out")
        if not isinstance(schema, dict):
            raise RequestError(f"{where}: a schema is an object, or true or false, got {json.dumps(schema)[:80]}")
        if depth > DEPTH_MAX:
            raise RequestError(f"{where}: schemas are nested more than {DEPTH_MAX} deep; make the schema simpler")
        self._check_keywords(schema, where, depth)
        for head in HEADS:
            if head in schema:
                return self._headed(head, schema, where, depth)
        types = types_in(schema, where) or self._implied_type(schema, where)
        if types is None:
            return {}
        options = [self._typed(name, schema, where, depth) for name in types]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _check_keywords(self, schema: Schema, where: str, depth: int) -> None:
        for name, advice in REFUSED.items():
            if name in schema and not (name == "uniqueItems" and schema[name] is False):
                raise RequestError(f"{where}: {name} cannot be enforced while text is generated; {advice}")
        if depth and "$id" in schema:
            raise RequestError(f"{where}: $id inside a schema cannot be enforced; name the schema in $defs instead")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise RequestError(
                f"{where}: required is a list of names of properties, beside them, got {json.dumps(required)[:80]}; "
                "name what is required there"
            )
        head = next((name for name in HEADS if name in schema), None)
        if head is None:
            return
        beside = sorted((ASSERTING & schema.keys()) - {head} - ({"type"} if head in ("const", "enum") else set()))
        if beside:
            raise RequestError(
                f"{where}: {', '.join(beside)} beside {head} cannot be enforced; say all of it in one of them"
            )

    def _implied_type(self, schema: Schema, where: str) -> tuple[str, ...] | None:
        """Returns the type that the keywords of a schema without `type` belong to."""
        kinds = [name for name, keywords in KEYWORDS_OF.items() if keywords & schema.keys()]
        if len(kinds) > 1:
            raise RequestError(f"{where}: keywords for {' and '.join(kinds)}; say which is meant, with type")
        return tuple(kinds) or None

    def _headed(self, head: str, schema: Schema, where: str, depth: int) -> Schema:
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
            raise RequestError(f"{where}: allOf with several schemas cannot be enforced; write them as one")
        if head == "oneOf":
            self._check_disjoint(inner, where)
        options = [(number, each) for number, each in enumerate(inner) if each is not False]
        if not options:
            raise RequestError(f"{where}: {head} allows no value; leave it out")
        return {"anyOf": [self._schema(each, f"{where}, {head} {number}", depth + 1) for number, each in options]}

    def _values(self, values: list[Any], schema: Schema, where: str) -> Schema:
        types = types_in(schema, where)
        for value in values:
            if types is not None and not is_one_of(value, types):
                raise RequestError(
                    f"{where}: {json.dumps(value)[:60]} is not of type {' or '.join(types)}; remove it or change type"
                )
            check_exact(value, where)
        return {"enum": values}

    def _check_disjoint(self, options: list[Any], where: str) -> None:
        overlap = first_overlap(options, self._resolve)
        if overlap is not None:
            raise RequestError(
                f"{where}, oneOf: a value might match both {overlap[0]} and {overlap[1]}, which oneOf forbids; write "
                "anyOf, or give each a required property with a const of its own"
            )

    # ---- references --------------------------------------------------------------------------------

    def _reference(self, reference: Any, where: str) -> Schema:
        target = self._resolve(reference, where)
        if reference not in self._definitions:
            self._define(reference, {}, _depth(target), where)
            self._definitions[reference] = self._schema(target, f"{where}, $ref {reference[:60]!r}", 1)
        return self._defined(reference)

    def _define(self, name: str, written: Schema, levels: int, where: str) -> None:
        self._levels += levels
        if self._levels > LEVELS_MAX:
            raise RequestError(f"{where}: the schema has too many definitions; make it simpler")
        self._definitions[name] = written

    def _defined(self, name: str) -> Schema:
        return {"$ref": f"#/$defs/{list(self._definitions).index(name)}"}

    def _resolve(self, reference: Any, where: str = "the schema") -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise RequestError(
                f"{where}: $ref {json.dumps(reference)[:80]} leads out of the schema; put what it names into $defs and "
                "write #/$defs/name"
            )
        target = self._root
        for part in unquote(reference[2:]).split("/") if reference != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise RequestError(f"{where}: $ref {reference[:80]!r} names nothing in this schema; add it to $defs")
            if isinstance(target, dict) and isinstance(target.get("$id"), str):
                raise RequestError(f"{where}: $ref {reference[:80]!r} leads through an $id; name the schema in $defs")
        return target

    # ---- types -------------------------------------------------------------------------------------

    def _typed(self, name: str, schema: Schema, where: str, depth: int) -> Schema:
        match name:
            case "string":
                return _string(schema, where)
            case "integer" | "number":
                return written_number(name, schema, where)
            case "array":
                return self._array(schema, where, depth)
            case "object":
                return self._object(schema, where, depth)
        return {"type": name}

    def _array(self, schema: Schema, where: str, depth: int) -> Schema:
        first, rest = schema.get("prefixItems", []), schema.get("items", schema.get("unevaluatedItems"))
        if isinstance(rest, list):
            # Before draft 2020-12, items was what prefixItems is now.
            first, rest = rest, schema.get("additionalItems")
        if not isinstance(first, list):
            raise RequestError(f"{where}: prefixItems is a list of schemas, got {json.dumps(first)[:80]}")
        if rest is None:
            # Where the first items are described, no others are written.
            rest = not first
        least, most = count(schema, "minItems", where) or 0, count(schema, "maxItems", where)
        first = first[: len(first) if most is None else most]
        limit = len(first) if rest is False else most
        if limit is not None and least > limit:
            raise RequestError(f"{where}: no array has at least {least} and at most {limit} items; change the numbers")
        prefix = [self._schema(each, f"{where}, prefixItems {number}", depth + 1) for number, each in enumerate(first)]
        has_more = limit is None or limit > len(first)
        written: Schema = {"type": "array", "minItems": least}
        written["items"] = self._schema(rest, f"{where}, items", depth + 1) if has_more else False
        return written | ({"prefixItems": prefix} if prefix else {}) | ({} if limit is None else {"maxItems": limit})

    def _object(self, schema: Schema, where: str, depth: int) -> Schema:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise RequestError(f"{where}: properties is an object of schemas, got {json.dumps(properties)[:80]}")
        missing = [name for name in required if name not in properties]
        if missing:
            raise RequestError(f"{where}: required {missing[0][:60]!r} is not described; add it to properties")
        # A schema with an empty list of properties, and no word on others, describes a function without arguments.
        is_open = "properties" not in schema or "patternProperties" in schema or "propertyNames" in schema
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", is_open))
        if not properties:
            return self._free_object(schema, others, where, depth)
        beside: list[str] = [name for name in ("patternProperties", "propertyNames") if name in schema]
        if isinstance(others, dict) and ASSERTING & others.keys():
            beside.append("additionalProperties with a schema")
        if beside:
            raise RequestError(
                f"{where}: {beside[0]} beside properties cannot be enforced; put the others into a property of "
                "their own"
            )
        written = {
            name: self._schema(each, f"{where}, properties {name[:60]!r}", depth + 1)
            for name, each in properties.items()
            if each is not False or name in required
        }
        if "minProperties" in schema or "maxProperties" in schema:
            # Every case below repeats its properties, and cases may nest: a reference is all that is repeated.
            for name, each in written.items():
                definition = f"{where}, properties {name[:60]!r} ({len(self._definitions)})"
                self._define(definition, each, _depth(each), where)
                written[name] = self._defined(definition)
        return _listed_object(written, set(required), schema, where)

    def _free_object(self, schema: Schema, others: Any, where: str, depth: int) -> Schema:
        """Rewrites an object of which no property is listed."""
        least, most = count(schema, "minProperties", where) or 0, count(schema, "maxProperties", where)
        names, patterns = None, schema.get("patternProperties")
        if patterns is not None:
            if not isinstance(patterns, dict) or len(patterns) != 1 or "propertyNames" in schema:
                raise RequestError(
                    f"{where}: patternProperties with several patterns, or beside propertyNames, cannot be enforced; "
                    "write one pattern"
                )
            if isinstance(others, dict) and ASSERTING & others.keys():
                raise RequestError(
                    f"{where}: additionalProperties with a schema beside patternProperties cannot be enforced; set it "
                    "to false"
                )
            ((pattern, others),) = patterns.items()
            names = _patterns({"pattern": pattern}, f"{where}, patternProperties")
        elif "propertyNames" in schema and schema["propertyNames"] is not True:
            names = self._names(schema["propertyNames"], f"{where}, propertyNames")
        if least > 1:
            # A property that is written twice counts once.
            raise RequestError(f"{where}: minProperties above 1 without properties cannot be enforced; name them")
        if others is False:
            most = 0
        if most is not None and most < least:
            raise RequestError(f"{where}: no object has at least {least} and at most {most} properties; change them")
        if most == 0:
            return {"type": "object", "additionalProperties": False}
        value = self._schema(others, f"{where}, properties", depth + 1)
        written: Schema = {"type": "object"}
        if names:
            written |= {"patternProperties": {names[0]: value}, "additionalProperties": False}
        else:
            written["additionalProperties"] = value
        return written | ({"minProperties": least} if least else {}) | ({} if most is None else {"maxProperties": most})

    def _names(self, schema: Any, where: str) -> list[str]:
        """Returns at most one regular expression, for the names of properties."""
        if not isinstance(schema, dict) or schema.get("type", "string") != "string":
            raise RequestError(f"{where}: names of properties are strings; describe one with pattern or enum")
        self._check_keywords(schema, where, 1)
        if "$ref" in schema:
            return self._names(self._resolve(schema["$ref"], where), where)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            if not isinstance(values, list) or not values or not all(isinstance(name, str) for name in values):
                raise RequestError(f"{where}: names of properties are strings; list some")
            return [f"^(?:{'|'.join(map(literal_pattern, values))})$"]
        if any(head in schema for head in HEADS):
            raise RequestError(f"{where}: anyOf and its kin cannot be enforced in names; write one pattern")
        found, (shortest, longest) = _patterns(schema, where), _lengths(schema, where)
        if shortest or longest is not None:
            any_character = character_class(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)))
            found.append(f"^{any_character}{{{shortest},{'' if longest is None else longest}}}$")
        if len(found) > 1:
            raise RequestError(f"{where}: pattern, format and lengths cannot be combined in names; write one pattern")
        return found


def _string(schema: Schema, where: str) -> Schema:
    shortest, longest = _lengths(schema, where)
    written: Schema = {"type": "string"}
    if shortest:
        written["minLength"] = shortest
    if longest is not None:
        written["maxLength"] = longest
    patterns = _patterns(schema, where)
    if len(patterns) > 1:
        return {"allOf": [written, *({"type": "string", "pattern": pattern} for pattern in patterns)]}
    return written | ({"pattern": patterns[0]} if patterns else {})


def _lengths(schema: Schema, where: str) -> tuple[int, int | None]:
    shortest, longest = count(schema, "minLength", where, LENGTH_MAX) or 0, count(schema, "maxLength", where)
    if longest is not None and longest < shortest:
        raise RequestError(f"{where}: maxLength {longest} is less than minLength {shortest}; no string is both")
    return shortest, None if longest is None else min(longest, LENGTH_MAX)


def _patterns(schema: Schema, where: str) -> list[str]:
    """Returns the regular expressions that a string has to match."""
    found = []
    expression, name = schema.get("pattern", ""), schema.get("format")
    if not isinstance(expression, str):
        raise RequestError(f"{where}: pattern is a string, got {str(expression)[:60]!r}")
    if expression:
        try:
            found.append(json_pattern(expression))
        except RequestError as problem:
            raise RequestError(f"{where}, pattern: {problem}") from None
    if "format" in schema:
        if name not in FORMATS:
            raise RequestError(
                f"{where}: format {str(name)[:60]!r} cannot be enforced; leave it out, write a pattern, or choose one "
                f"of {', '.join(sorted(FORMATS))}"
            )
        found.append(json_pattern(FORMATS[name]))
    return found


def _listed_object(properties: dict[str, Schema], required: set[str], schema: Schema, where: str) -> Schema:
    """Returns an object of these properties and no others.

    llguidance counts properties only where all are required, so a schema that counts becomes one case for each set of
    properties that is large and small enough. With minProperties alone a case is the first properties that are there:
    those between them are absent, those after them optional.
    """
    least, most = count(schema, "minProperties", where) or 0, count(schema, "maxProperties", where)
    names, optional = list(properties), [name for name in properties if name not in required]
    fewest, greatest = max(0, least - len(required)), len(optional)
    if most is not None:
        greatest = min(greatest, most - len(required))
    if fewest > greatest:
        raise RequestError(f"{where}: no object has as few and as many properties as asked for; change the numbers")

    def case(present: set[str], last: int) -> Schema:
        """Returns the object with the properties `present`, and any of those from place `last` on."""
        kept = [name for place, name in enumerate(names) if name in present or place >= last]
        return {
            "type": "object",
            "properties": {name: properties[name] for name in kept},
            "required": [name for name in kept if name in present],
            "additionalProperties": False,
        }

    if fewest == 0 and greatest == len(optional):
        return case(required, 0)
    counts = [fewest] if greatest == len(optional) else range(fewest, greatest + 1)
    if sum(comb(len(optional), number) for number in counts) > CASES_MAX:
        raise RequestError(
            f"{where}: minProperties and maxProperties leave more than {CASES_MAX} sets of properties; make some of "
            "them required"
        )
    cases = []
    for number in counts:
        for chosen in combinations(optional, number):
            is_open = greatest == len(optional) and chosen
            cases.append(case(required | set(chosen), names.index(chosen[-1]) + 1 if is_open else len(names)))
    return {"anyOf": cases}


def _depth(schema: Any) -> int:
    """Returns how deep lists and objects nest in a piece of JSON."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return 1 + max(map(_depth, inner), default=0)
