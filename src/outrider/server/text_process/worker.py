"""Text to tokens: a plain text, or a conversation by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import RequestError
from outrider.models.chat import ChatTemplate
from outrider.models.tokenizer import Tokenizer, tokenizer_from_json
from outrider.server.text_process.messages import BadText, Encode, Render, TextAnswer, TextOrder, TextSetup, Tokens
from outrider.server.text_process.tool_prompt import messages_with_tools_spelt_out

PROBE_NAME = "probe_of_outrider"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
END_MARK = "\u2402end of what was written so far\u2403"


class TextWorker:
    def __init__(self, setup: TextSetup) -> None:
        self.tokenizer: Tokenizer = tokenizer_from_json(
            setup.tokenizer, source=setup.tokenizer_source, bos_id=setup.bos_id, eos_ids=setup.eos_ids
        )
        self._template: ChatTemplate | None = None
        if setup.templates:
            self._template = ChatTemplate(
                setup.templates, source=setup.template_source, variables=setup.template_variables
            )
        self._knows_tools = self._template is not None and _knows_tools(self._template)

    def obey(self, order: TextOrder) -> TextAnswer:
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
            raise RequestError("this model has no chat template, so it is not made for conversations; use completions")
        messages: Sequence[Mapping[str, Any]] = [_as_templates_expect(message) for message in order.messages]
        tools = order.tools or None
        if not self._knows_tools:
            messages, tools = messages_with_tools_spelt_out(messages, tools), None
        if not order.continue_last:
            return self._template.render(
                messages, add_generation_prompt=order.add_generation_prompt, tools=tools, **order.variables
            )
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{END_MARK}"}]
        text = self._template.render(marked, add_generation_prompt=False, tools=tools, **order.variables)
        before, mark, _after = text.partition(END_MARK)
        if not mark:
            raise RequestError("the chat template does not show the last message as it is; it cannot be continued")
        return before


def _knows_tools(template: ChatTemplate) -> bool:
    """Does the template write the tools it is given?"""
    try:
        text = template.render([{"role": "user", "content": "?"}], tools=[PROBE_TOOL])
    except RequestError:
        return False
    return PROBE_NAME in text


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls travel as text; templates print them as objects."""
    plain = dict(message)
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        try:
            function["arguments"] = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError):
            # No JSON, or a number of thousands of digits: it is shown as it is.
            pass
        calls.append({**call, "function": function})
    if calls:
        plain["tool_calls"] = calls
    return plain
