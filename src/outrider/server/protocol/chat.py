"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.server.protocol.fields import Fields, GenerationFields, not_available

NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,64}$"


class ContentPart(Fields):
    """A part of a message. Only text is read; parts of other types are refused, by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class FunctionCall(Fields):
    name: str
    arguments: str = "{}"


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Fields of answers, which clients send back as part of the conversation.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Fields):
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable of the model's chat template, which may ignore it."""
    verbosity: Annotated[
        Any, not_available("verbosity", "say in a message how long the answer should be", "medium")
    ] = None
    best_of: Annotated[Any, not_available("best_of", "ask for n answers and choose", 1)] = None
    # Reasoning is part of the text here, as the model writes it.
    separate_reasoning: bool | None = None
    """Accepted and ignored: routers add it to every request."""
    stream_reasoning: bool | None = None
    """Accepted and ignored: routers add it to every request."""
    include_reasoning: Annotated[
        Any, not_available("include_reasoning", "reasoning is part of the text; leave it out", True)
    ] = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the last message is the beginning of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as enable_thinking."""
