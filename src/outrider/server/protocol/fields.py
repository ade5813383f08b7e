"""Fields of requests for completions and for chats.

Fields that clients send routinely and that do not affect the answer (user, metadata, store, …) are accepted and
ignored. Fields that would change the meaning of an answer and are not implemented are refused, and so are unknown ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def not_available(name: str, what_to_do: str, *harmless: object) -> BeforeValidator:
    """Returns a validator that refuses every value but None and the harmless ones, and says what to do instead."""

    def refuse(value: object) -> None:
        if value is not None and value not in harmless:
            raise PydanticCustomError(
                "not_available", "{name} is not available here; {what_to_do}", {"name": name, "what_to_do": what_to_do}
            )

    return BeforeValidator(refuse)


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Accepted and ignored: events are not padded."""
    continuous_usage_stats: bool = False
    """Whether every chunk carries the usage so far."""


class JsonSchemaFormat(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Fields):
    """vLLM's form of structured output; exactly one field may be set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class IgnoredFields(Fields):
    """Fields about the client, its bill or its cache, which do not affect the answer."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class KVTransferParams(BaseModel):
    """What a proxy sends to a prefill and to a decode worker, and a prefill worker answers. Engines fill in different
    fields; only these are read, whatever the others hold."""

    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_decode: bool | None = None
    """Asks a prefill worker to compute the prompt and to hold its KV for a decode worker."""
    do_remote_prefill: bool | None = None
    """Asks a decode worker to start from the KV that `ticket` leads to."""
    ticket: str | None = None
    """The ticket that the prefill worker returned; null if it had no room to hold the KV."""


class SharedFields(IgnoredFields):
    """Fields that all routes that generate text have in common."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    priority: int = Field(default=0, ge=0, le=1000)
    """Lower values run first. A client can only lower its own priority: 0 is both the default and the least value."""
    cache_salt: str | None = Field(default=None, max_length=256)
    """Prompts with different salts share nothing in the prefix cache."""
    speculate: bool = True
    """False decodes without drafts. The text is the same."""
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=65536)
    """How many drafts are proposed and verified at each step, at most as many as the model's entry in /v1/models says;
    0 means none. Null leaves it to the server, which may choose anew at each step. The text is the same."""
    kv_transfer_params: KVTransferParams | None = None
    """For prefill/decode disaggregation: sent by proxies."""
    return_token_origins: bool = False
    """Whether to report of each token if it is an accepted draft, a correction, a bonus token, or plain."""


class GenerationFields(SharedFields):
    n: int | None = Field(default=1, ge=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(default=0, ge=0)
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # There is no beam search. Clients of other engines send the values that turn it off.
    use_beam_search: Annotated[Any, not_available("use_beam_search", "sample n answers and choose", False)] = None
    length_penalty: Annotated[Any, not_available("length_penalty", "it belongs to beam search; leave it out", 1)] = None
    early_stopping: Annotated[
        Any, not_available("early_stopping", "it belongs to beam search; leave it out", False)
    ] = None

    # Routers for several engines add fields of other engines to every request, with the values that change nothing.
    no_stop_trim: Annotated[Any, not_available("no_stop_trim", "send include_stop_str_in_output instead", False)] = None
    return_hidden_states: Annotated[
        Any, not_available("return_hidden_states", "answers have no hidden states; leave it out", False)
    ] = None

    return_token_ids: bool = False

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_always(self) -> bool:
        return self.stream_options is not None and self.wants_usage and self.stream_options.continuous_usage_stats
