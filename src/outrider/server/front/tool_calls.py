"""Tool calls in the output of a model, parsed while it is generated.

    text <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> text

This is the format of Hermes, Qwen and SmolLM2; SmolLM2 puts several calls into one list. A call begins when its name
is complete; its arguments follow piece by piece, as they are generated, and may turn out to be invalid JSON. Output
between the tags that does not begin like a call stays text, so that nothing is lost.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from outrider.grammar import Grammar
from outrider.server.front.grammars import json_schema
from outrider.server.front.problems import Problem
from outrider.server.protocol.chat import ChatRequest, NamedTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(
    r'\s*+\}?+\s*+[\[,]?+\s*+\{\s*+"name"\s*+:\s*+("(?:[^"\\\n]|\\.)++")\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
"""A call, alone or in a list, up to the brace that opens its arguments. All quantifiers are possessive, so that long
white space does not make matching slow."""


class CallPiece(NamedTuple):
    """A part of a call. A piece with a name begins a call; other pieces add to the arguments of the latest call."""

    arguments: str
    id: str | None = None
    name: str | None = None


class ParsedCall(NamedTuple):
    id: str
    name: str
    arguments: str


class Found(NamedTuple):
    text: str = ""
    calls: tuple[CallPiece, ...] = ()


class ToolParser(Protocol):
    def feed(self, text: str) -> Found: ...

    def finish(self) -> Found: ...


class NoTools:
    """The parser of a request without tools: all output is text."""

    def feed(self, text: str) -> Found:
        return Found(text)

    def finish(self) -> Found:
        return Found()


class CallScanner:
    """Parses the JSON of one call or of a list of calls."""

    def __init__(self) -> None:
        self.body = ""
        """All text so far."""
        self.begun = 0
        """Number of calls so far."""
        self._rest = ""
        self._depth = 0
        """Nesting of braces and brackets in the arguments; 0 outside of them."""
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> list[CallPiece]:
        self.body += text
        self._rest += text
        pieces: list[CallPiece] = []
        while self._rest:
            if not self._depth:
                head = HEAD.match(self._rest)
                name = None if head is None else _text_of(head[1])
                if head is None or name is None:
                    break
                pieces.append(_begin(name))
                self.begun += 1
                self._rest = self._rest[head.end() :]
            arguments = self._take_arguments()
            pieces.append(CallPiece(arguments))
        return pieces

    def _take_arguments(self) -> str:
        """Removes and returns the text up to the brace that closes the arguments, or all of it."""
        for place, letter in enumerate(self._rest):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
            if not self._depth:
                taken, self._rest = self._rest[: place + 1], self._rest[place + 1 :]
                return taken
        taken, self._rest = self._rest, ""
        return taken

    def close(self) -> list[CallPiece]:
        """Returns the calls whose fields come in another order, which only the complete JSON shows."""
        return [piece for call in calls_in(self.body)[self.begun :] for piece in whole_call(call)]


class HermesParser:
    """The parser of tagged calls. White space before, between and after calls is not part of the text."""

    def __init__(self) -> None:
        self._rest = ""
        self._scanner: CallScanner | None = None
        """The scanner of the open tag, if any."""
        self._gap = ""
        """White space before the open tag."""
        self._after_call = False

    def feed(self, text: str) -> Found:
        self._rest += text
        shown: list[str] = []
        calls: list[CallPiece] = []
        while True:
            if self._after_call and self._scanner is None:
                self._rest = self._rest.lstrip()
            head, tag, tail = self._rest.partition(OPEN if self._scanner is None else CLOSE)
            if not tag:
                break
            self._rest = tail
            if self._scanner is None:
                shown.append(head.rstrip())
                self._gap, self._scanner = head[len(shown[-1]) :], CallScanner()
            else:
                calls += self._scanner.feed(head)
                rest = self._close(calls)
                shown += [rest, CLOSE] if rest else []
        if self._scanner is None:
            shown.append(self._take_text())
        else:
            calls += self._scanner.feed(self._take_all_but(CLOSE))
        return Found("".join(shown), tuple(calls))

    def _close(self, calls: list[CallPiece]) -> str:
        """Closes the open tag. Returns its text, tag included, if it was not a call."""
        assert self._scanner is not None
        scanner, self._scanner = self._scanner, None
        more = scanner.close()
        calls += more
        self._after_call = bool(more) or scanner.begun > 0
        return "" if self._after_call else self._gap + OPEN + scanner.body

    def _take_all_but(self, tag: str) -> str:
        """Removes and returns the text that cannot be part of the tag."""
        held = next((n for n in range(len(tag) - 1, 0, -1) if self._rest.endswith(tag[:n])), 0)
        safe = self._rest[: len(self._rest) - held]
        self._rest = self._rest[len(safe) :]
        return safe

    def _take_text(self) -> str:
        """Removes and returns the text that can be neither part of a tag nor white space before one."""
        taken = self._take_all_but(OPEN)
        safe = taken.rstrip()
        self._rest = taken[len(safe) :] + self._rest
        self._after_call = self._after_call and not safe
        return safe

    def finish(self) -> Found:
        rest, self._rest = self._rest, ""
        if self._scanner is None:
            return Found(rest)
        # Some models end their turn without closing the tag.
        calls = self._scanner.feed(rest)
        return Found(self._close(calls), tuple(calls))


class ForcedParser:
    """The parser of output that a grammar forces to be the arguments of one function, or a list of calls."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._scanner = CallScanner()

    def feed(self, text: str) -> Found:
        if self._name is None:
            return Found(calls=tuple(self._scanner.feed(text)))
        begun, self._scanner.begun = self._scanner.begun, 1
        return Found(calls=(*([] if begun else [_begin(self._name)]), CallPiece(text)))

    def finish(self) -> Found:
        if self._name is not None:
            return Found()
        calls = self._scanner.close()
        return Found("" if calls or self._scanner.begun else self._scanner.body, tuple(calls))


def calls_in(text: str) -> list[ParsedCall]:
    """Returns the calls in a JSON object or a list of objects; none if the text is anything else."""
    try:
        value = _value_of(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(ParsedCall(_new_id(), item["name"], arguments))
    return calls


def whole_call(call: ParsedCall) -> tuple[CallPiece, CallPiece]:
    return CallPiece("", id=call.id, name=call.name), CallPiece(call.arguments)


def with_piece(calls: Sequence[ParsedCall], piece: CallPiece) -> list[ParsedCall]:
    """Returns the calls with one more piece."""
    if piece.name is not None:
        assert piece.id is not None
        return [*calls, ParsedCall(piece.id, piece.name, piece.arguments)]
    *before, latest = calls
    return [*before, latest._replace(arguments=latest.arguments + piece.arguments)]


def _begin(name: str) -> CallPiece:
    return CallPiece("", id=_new_id(), name=name)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _text_of(quoted: str) -> str | None:
    try:
        return str(_value_of(quoted))
    except ValueError:
        return None


def _value_of(text: str) -> Any:
    """Returns the value of a JSON text; raises ValueError also for values that cannot be encoded again, such as half a
    surrogate pair or a number with thousands of digits."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


# ---- the parser and the grammar of a request -------------------------------------------------------


def parser_for(tools: Sequence[Tool] | None, choice: object) -> ToolParser:
    if not tools or choice == "none":
        return NoTools()
    if isinstance(choice, NamedTool):
        return ForcedParser(choice.function.name)
    return ForcedParser(None) if choice == "required" else HermesParser()


def forced_grammar(body: ChatRequest) -> Grammar | None:
    """Returns the grammar of the output where tool_choice forces a call."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        chosen = next(tool for tool in tools if tool.function.name == choice.function.name)
        return json_schema(_parameters(chosen), param="tool_choice")
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _moved(_parameters(tool), f"#/items/anyOf/{number}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return json_schema({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}, param="tool_choice")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
"""JSON Schema keywords whose values are data, not schemas."""
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""JSON Schema keywords that hold schemas under names chosen by the client, which may be those of keywords."""


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the schema with its references adjusted to its place inside a larger schema."""

    def moved(value: Any, *, is_schema: bool = True) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {
            name: each
            if is_schema and name in DATA_KEYWORDS
            else moved(each, is_schema=not (is_schema and name in NAMED_SCHEMAS))
            for name, each in value.items()
        }
        reference = found.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            found["$ref"] = place + reference[1:]
        return found

    try:
        whole: dict[str, Any] = moved({name: each for name, each in schema.items() if name != "$id"})
    except RecursionError:
        raise Problem("tools: the parameters are nested too deeply; make them simpler", param="tools") from None
    return whole
