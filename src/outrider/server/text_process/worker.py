"""Turns text into tokens: a plain text, or a conversation rendered with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import RequestError
from outrider.models.chat import ChatTemplate
from outrider.server.messages import TextFacts
from outrider.server.text_process.messages import BadText, Encode, Render, TextAnswer, TextOrder, Tokens
from outrider.server.text_process.tool_prompt import messages_with_hermes_tools

PROBE_NAME = "probe_of_outrider"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
END_MARK = "\u2402end of what was written so far\u2403"


class TextWorker:
    def __init__(self, facts: TextFacts) -> None:
        self.tokenizer = facts.make_tokenizer()
        self._template: ChatTemplate | None = None
        if facts.templates:
            self._template = ChatTemplate(
                facts.templates, source=facts.template_source, variables=facts.template_variables
            )
        self._knows_tools = self._template is not None and _knows_tools(self._template)

    def carry_out(self, order: TextOrder) -> TextAnswer:
        try:
            if isinstance(order, Encode):
                ids = self.tokenizer.encode(order.text, add_special_tokens=order.add_special_tokens)
            else:
                ids = self.tokenizer.encode(self._render(order), add_special_tokens=False)
        except RequestError as error:
            return BadText(message=str(error))
        except (MemoryError, RecursionError):
            return BadText(message="the text is too large or too deeply nested to be rendered; shorten it")
        return Tokens(count=len(ids), token_ids=ids if len(ids) <= order.tokens_max else [])

    def _render(self, order: Render) -> str:
        if self._template is None:
            raise RequestError("this model has no chat template, so it cannot answer conversations; use completions")
        messages: Sequence[Mapping[str, Any]] = [_with_parsed_arguments(message) for message in order.messages]
        tools = order.tools or None
        if not self._knows_tools:
            messages, tools = messages_with_hermes_tools(messages, tools), None
        if not order.continue_last:
            return self._template.render(
                messages, add_generation_prompt=order.add_generation_prompt, tools=tools, **order.variables
            )
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{END_MARK}"}]
        text = self._template.render(marked, add_generation_prompt=False, tools=tools, **order.variables)
        before, mark, _after = text.partition(END_MARK)
        if not mark:
            raise RequestError(
                "the chat template changes the last message, so it cannot be continued; leave "
                "continue_final_message out"
            )
        return before


def _knows_tools(template: ChatTemplate) -> bool:
    """Returns whether the template renders the tools that it is given."""
    try:
        text = template.render([{"role": "user", "content": "?"}], tools=[PROBE_TOOL])
    except RequestError:
        return False
    return PROBE_NAME in text


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its tool calls as objects, as chat templates expect them."""
    plain = dict(message)
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        try:
            function["arguments"] = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError):
            # Not JSON, or a number with thousands of digits; the template gets the text.
            pass
        calls.append({**call, "function": function})
    if calls:
        plain["tool_calls"] = calls
    return plain
