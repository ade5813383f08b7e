"""A chat request's messages in the form that chat templates expect, within the server's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.server.config import ServerConfig
from outrider.server.front.problems import Problem
from outrider.server.messages import Facts
from outrider.server.protocol.chat import ChatMessage, ChatRequest, ContentPart, NamedTool, Tool
from outrider.server.protocol.responses import InputPart
from outrider.server.protocol.tokenize import TokenizeRequest
from outrider.server.text_process.messages import Render

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "self"}
)
"""Template variables that clients may not set; other fields of the request determine them."""


def render_order(
    body: ChatRequest | TokenizeRequest, config: ServerConfig, facts: Facts, *, with_tools: bool, tokens_max: int
) -> Render:
    if not facts.text.templates:
        raise Problem(
            f"{facts.model_name} has no chat template, so it cannot answer conversations; use /v1/completions",
            code="no_chat_template",
        )
    messages = body.messages or []
    if len(messages) > config.messages_max:
        raise Problem(f"at most {config.messages_max} messages, got {len(messages)}", param="messages")
    variables = dict(body.chat_template_kwargs or {})
    reserved = RESERVED_VARIABLES.intersection(variables) | {name for name in variables if not name.isidentifier()}
    if reserved:
        raise Problem(f"chat_template_kwargs may not set {sorted(reserved)[0]!r}", param="chat_template_kwargs")
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message:
        if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
            raise Problem("continue_final_message and add_generation_prompt exclude each other; give one")
        if messages[-1].role != "assistant":
            raise Problem("continue_final_message needs a last message by the assistant", param="messages")
    _check_results(messages)
    return Render(
        messages=[_plain(message, place) for place, message in enumerate(messages)],
        tools=tool_definitions(body.tools, config) if with_tools else None,
        variables=variables,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_last=body.continue_final_message,
        tokens_max=tokens_max,
    )


def _check_results(messages: Sequence[ChatMessage]) -> None:
    """Checks that each tool result answers a call before it."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls or () if call.id is not None}
        if message.role != "tool":
            continue
        if message.tool_call_id is None:
            raise Problem(f"messages[{place}]: the result of a tool needs tool_call_id", param="messages")
        if message.tool_call_id not in called:
            raise Problem(
                f"messages[{place}]: no message before it calls a tool with the id {message.tool_call_id[:64]!r}; send "
                "the assistant's message with its tool_calls too",
                param="messages",
            )


def _plain(message: ChatMessage, place: int) -> dict[str, Any]:
    # Chat templates know only the older name of this role.
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if content is not None:
        content = joined_text(content, ("text",), where=f"messages[{place}]", param="messages")
    if content is None and not message.tool_calls:
        raise Problem(f"messages[{place}] has no content", param="messages")
    plain["content"] = content or ""
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        if message.role != "assistant":
            raise Problem(f"messages[{place}]: only the assistant calls tools", param="messages")
        plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if message.role == "tool" and message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def joined_text(
    content: str | Sequence[ContentPart] | Sequence[InputPart], text_types: Sequence[str], *, where: str, param: str
) -> str:
    """Returns the text of a message; refuses parts that are neither a refusal nor of one of the text types."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.text if part.type in text_types else part.refusal if part.type == "refusal" else None
        if text is None:
            raise Problem(
                f"{where}: a part of type {part.type[:40]!r} cannot be read; this server takes text only", param=param
            )
        texts.append(text)
    return "\n".join(texts)


def tool_definitions(tools: Sequence[Tool] | None, config: ServerConfig) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if len(tools) > config.tools_max:
        raise Problem(f"at most {config.tools_max} tools, got {len(tools)}", param="tools")
    names: set[str] = set()
    for place, tool in enumerate(tools):
        name, parameters = tool.function.name, tool.function.parameters or {}
        if name in names:
            raise Problem(f"tools[{place}]: another tool has the name {name!r} too; rename one", param="tools")
        names.add(name)
        if parameters.get("type", "object") != "object" or not isinstance(parameters.get("properties", {}), dict):
            raise Problem(
                f"tools[{place}]: the parameters of {name!r} must be a JSON schema of an object, such as "
                '{"type": "object", "properties": {"town": {"type": "string"}}}',
                param="tools",
            )
    return [tool.model_dump(exclude_none=True) for tool in tools]


def check_tool_choice(body: ChatRequest, facts: Facts) -> None:
    choice, names = body.tool_choice, [tool.function.name for tool in body.tools or []]
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise Problem("tool_choice requires a call, but there are no tools; send tools too", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise Problem(
            f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools", param="tool_choice"
        )
    if not facts.supports_grammars:
        raise Problem(
            "this server cannot force a call, since that needs structured output; use tool_choice 'auto' and check "
            "whether the answer has tool_calls",
            param="tool_choice",
            code="not_available",
        )
