"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.server.protocol.chat import NAME_PATTERN
from outrider.server.protocol.fields import Fields, SharedFields, not_available

NOT_KEPT = "nothing is kept between requests, so send everything"


class InputPart(Fields):
    """A part of a message. Only text is read; parts of other types are refused, by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    detail: Any = None


class InputItem(Fields):
    """A message, a function call by the model, or the output of a function call."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesTool(Fields):
    type: Literal["function"]
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponsesTool(Fields):
    type: Literal["function"]
    name: str


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: Annotated[
        Any, not_available("verbosity", "say in the instructions how long the answer should be", "medium")
    ] = None


class ResponsesStreamOptions(Fields):
    include_obfuscation: bool | None = None


class ResponsesRequest(SharedFields):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0)
    stream_options: ResponsesStreamOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponsesTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Annotated[Any, not_available("truncation", "leave out of the input what is too much", "disabled")] = (
        None
    )
    background: Annotated[Any, not_available("background", "wait for the answer, or stream it", False)] = None
    previous_response_id: Annotated[
        Any, not_available("previous_response_id", f"{NOT_KEPT} as a list of input items")
    ] = None
    conversation: Annotated[Any, not_available("conversation", f"{NOT_KEPT} as a list of input items")] = None
    reasoning: Annotated[Any, not_available("reasoning", "this API has no reasoning items; leave it out")] = None
    prompt: Annotated[Any, not_available("prompt", f"{NOT_KEPT} as instructions and input")] = None
    max_tool_calls: Annotated[
        Any, not_available("max_tool_calls", "no tools are run here, they are only asked for; leave it out")
    ] = None

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
