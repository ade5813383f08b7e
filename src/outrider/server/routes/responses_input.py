"""The chat request that a request for a response is equivalent to."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.server.front.conversation import joined_text
from outrider.server.front.problems import Problem
from outrider.server.protocol.chat import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from outrider.server.protocol.fields import JsonSchemaFormat, ResponseFormat, SharedFields
from outrider.server.protocol.responses import InputItem, InputPart, NamedResponsesTool, ResponsesRequest

TEXT_PARTS = ("input_text", "output_text", "text")


def as_chat(body: ResponsesRequest) -> ChatRequest:
    choice = body.tool_choice
    if body.top_logprobs and not body.wants_logprobs:
        raise Problem("top_logprobs needs include: ['message.output_text.logprobs']", param="top_logprobs")
    return ChatRequest(
        **{name: getattr(body, name) for name in SharedFields.model_fields},
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        tools=[
            Tool(
                type="function",
                function=FunctionDefinition(
                    name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
                ),
            )
            for tool in body.tools or ()
        ]
        or None,
        tool_choice=(
            NamedTool(type="function", function=NamedFunction(name=choice.name))
            if isinstance(choice, NamedResponsesTool)
            else choice
        ),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
    )


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        schema = JsonSchemaFormat.model_validate({"name": wanted.name, "schema": wanted.schema_})
    return ResponseFormat(type=wanted.type, json_schema=schema)


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if body.instructions is not None:
        messages.append(ChatMessage(role="system", content=body.instructions))
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not items:
        raise Problem("input is an empty list; send at least one message", param="input")
    called: set[str | None] = set()
    for place, item in enumerate(items):
        if item.type == "function_call":
            _add_call(messages, item, place)
            called.add(item.call_id)
        elif item.type == "function_call_output":
            if item.call_id is None or item.output is None:
                raise Problem(f"input[{place}]: a call's output needs call_id and output", param="input")
            if item.call_id not in called:
                raise Problem(
                    f"input[{place}]: no function_call before it has the call_id {item.call_id[:64]!r}; send that item "
                    "too, since nothing is kept between requests",
                    param="input",
                )
            messages.append(ChatMessage(role="tool", content=_text(item.output, place), tool_call_id=item.call_id))
        else:
            if item.role is None or item.content is None:
                raise Problem(f"input[{place}]: a message needs role and content", param="input")
            messages.append(ChatMessage(role=item.role, content=_text(item.content, place)))
    return messages


def _add_call(messages: list[ChatMessage], item: InputItem, place: int) -> None:
    """Adds a call to the assistant's message before it, or to a new one."""
    if item.name is None or item.call_id is None:
        raise Problem(f"input[{place}]: a call needs name and call_id", param="input")
    call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments or "{}"))
    if messages and messages[-1].role == "assistant":
        before = messages.pop()
        messages.append(before.model_copy(update={"tool_calls": [*(before.tool_calls or ()), call]}))
    else:
        messages.append(ChatMessage(role="assistant", content=None, tool_calls=[call]))


def _text(content: str | Sequence[InputPart], place: int) -> str:
    return joined_text(content, TEXT_PARTS, where=f"input[{place}]", param="input")
