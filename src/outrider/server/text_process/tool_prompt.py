"""Tools for models whose chat template does not render them: written into the messages in the Hermes format.

Definitions go into the system message, calls into the assistant's message, results into a user message:

    <tools>…</tools>        <tool_call>{"name": …, "arguments": …}</tool_call>        <tool_response>…</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INSTRUCTIONS = (
    "You may call functions to answer. Their signatures, one JSON object per line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write a JSON object with its name and its arguments between tags, and nothing else:\n"
    '<tool_call>\n{{"name": <function>, "arguments": <object>}}\n</tool_call>'
)


def messages_with_hermes_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    plain = [_with_calls_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = INSTRUCTIONS.format(tools=lines)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(_hermes_call(call), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])}


def _hermes_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function.get("arguments") or {}}
