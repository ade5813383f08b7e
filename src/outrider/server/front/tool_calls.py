"""Tool calls in what a model writes, found while it writes them.

    text <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> text

That is how Hermes, Qwen and SmolLM2 call; SmolLM2 puts several into one list. What is between the tags and is no
such JSON stays text: nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from outrider.grammar import Grammar
from outrider.server.front.grammars import json_schema
from outrider.server.front.problems import Problem
from outrider.server.protocol.chat import ChatRequest, NamedTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ParsedCall(NamedTuple):
    id: str
    name: str
    arguments: str
    """As JSON."""


class Found(NamedTuple):
    text: str = ""
    calls: tuple[ParsedCall, ...] = ()


class ToolParser(Protocol):
    def feed(self, text: str) -> Found: ...

    def finish(self) -> Found: ...


class NoTools:
    """Everything is text."""

    def feed(self, text: str) -> Found:
        return Found(text)

    def finish(self) -> Found:
        return Found()


class HermesParser:
    """White space before, between and behind calls belongs to them, and is not shown."""

    def __init__(self) -> None:
        self._rest = ""
        self._inside = False
        self._gap = ""
        """White space before the tag that is open."""
        self._behind_call = False

    def feed(self, text: str) -> Found:
        self._rest += text
        shown: list[str] = []
        calls: list[ParsedCall] = []
        while True:
            if self._behind_call and not self._inside:
                self._rest = self._rest.lstrip()
            head, tag, tail = self._rest.partition(CLOSE if self._inside else OPEN)
            if not tag:
                break
            self._rest = tail
            if self._inside:
                found = calls_in(head)
                calls += found
                shown += [] if found else [self._gap, OPEN, head, CLOSE]
                self._behind_call = bool(found)
            else:
                shown.append(head.rstrip())
                self._gap = head[len(shown[-1]) :]
            self._inside = not self._inside
        if not self._inside:
            shown.append(self._take_safe())
        return Found("".join(shown), tuple(calls))

    def _take_safe(self) -> str:
        """What can be no part of a tag, nor white space before one."""
        held = next((n for n in range(len(OPEN) - 1, 0, -1) if self._rest.endswith(OPEN[:n])), 0)
        safe = self._rest[: len(self._rest) - held].rstrip()
        self._rest = self._rest[len(safe) :]
        self._behind_call = self._behind_call and not safe
        return safe

    def finish(self) -> Found:
        rest, self._rest = self._rest, ""
        if not self._inside:
            return Found(rest)
        # Some models end their turn instead of closing the tag.
        calls = calls_in(rest)
        return Found("" if calls else self._gap + OPEN + rest, tuple(calls))


class ForcedParser:
    """The output is the arguments of one function, or a list of calls: a grammar saw to that."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> Found:
        self._text += text
        return Found()

    def finish(self) -> Found:
        if self._name is not None:
            return Found(calls=(_call(self._name, self._text),))
        calls = calls_in(self._text)
        return Found("" if calls else self._text, tuple(calls))


def calls_in(text: str) -> list[ParsedCall]:
    """The calls that a JSON object or a list of them makes; none if it is anything else."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return []
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(_call(item["name"], arguments))
    return calls


def _call(name: str, arguments: str) -> ParsedCall:
    return ParsedCall(f"call_{secrets.token_hex(12)}", name, arguments)


# ---- what a request wants --------------------------------------------------------------------------


def parser_for(tools: Sequence[Tool] | None, choice: object) -> ToolParser:
    if not tools or choice == "none":
        return NoTools()
    if isinstance(choice, NamedTool):
        return ForcedParser(choice.function.name)
    return ForcedParser(None) if choice == "required" else HermesParser()


def forced_grammar(body: ChatRequest) -> Grammar | None:
    """Where the client leaves the model no choice: the form that its output must have."""
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


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A schema at another place of a larger one: its references lead to where its parts are now."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {name: moved(each) for name, each in value.items()}
        reference = found.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            found["$ref"] = place + reference[1:]
        return found

    try:
        whole: dict[str, Any] = moved({name: each for name, each in schema.items() if name != "$id"})
    except RecursionError:
        raise Problem("tools: the parameters are nested too deep; make them simpler", param="tools") from None
    return whole
