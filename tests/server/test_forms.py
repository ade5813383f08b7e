"""Output in a given form, asked for in each of the ways that clients know; a random model would say none of it."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from tests.server.running import RunningServer

from outrider.server.front.tool_calls import forced_grammar
from outrider.server.protocol.chat import ChatRequest

CHAT = [{"role": "user", "content": "Which animal?"}]


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)
    is_tame: bool


@pytest.fixture(scope="module")
def client(tiny: RunningServer) -> openai.OpenAI:
    return tiny.openai()


def said(client: openai.OpenAI, **extra: Any) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=100, temperature=1, seed=1, extra_body=extra
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_official_client_parses_what_it_asked_for(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=CHAT, response_format=Animal, max_tokens=100, temperature=temperature, seed=2
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Animal)
    plain = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_tokens=100,
        temperature=temperature,
        seed=2,
        extra_body={"speculate": False, "guided_json": Animal.model_json_schema()},
    )
    assert plain.choices[0].message.content == answer.choices[0].message.content


def test_a_stream_has_the_form_too(client: openai.OpenAI) -> None:
    schema = {"name": "animal", "schema": Animal.model_json_schema()}
    stream = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=100,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert Animal.model_validate_json(text)


def test_a_regular_expression_a_choice_and_a_grammar(client: openai.OpenAI) -> None:
    assert re.fullmatch("[a-c]{2,5}[0-9]", said(client, guided_regex="[a-c]{2,5}[0-9]"))
    assert said(client, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert re.fullmatch("(ab){1,3}", said(client, guided_grammar='root ::= "ab" | "abab" | "ababab"'))


def test_several_continuations_each_have_the_form(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="A cat",
        n=3,
        temperature=1,
        seed=4,
        max_tokens=100,
        extra_body={"guided_json": Animal.model_json_schema()},
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert Animal.model_validate_json(choice.text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "note"}}])
def test_a_call_that_must_be_made_is_made(client: openai.OpenAI, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "note", "parameters": Animal.model_json_schema()}}
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, tools=[tool], tool_choice=choice, parallel_tool_calls=False, max_tokens=150
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "note"
    assert Animal.model_validate(json.loads(call.function.arguments))


def test_references_in_tools_lead_to_their_own_tool(client: openai.OpenAI) -> None:
    """Two tools that each have a definition of the same name."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"what": {"$ref": "#/$defs/thing"}},
                    "required": ["what"],
                    "$defs": {"thing": {"enum": values}},
                },
            },
        }
        for name, values in (("first", ["a", "b"]), ("second", [1, 2]))
    ]
    for seed in range(6):
        answer = client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.5,
            seed=seed,
            max_tokens=150,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        said = json.loads(call.function.arguments)["what"]
        assert said in (["a", "b"] if call.function.name == "first" else [1, 2])


def test_the_responses_api_gives_a_form_too(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="tiny", input="Which animal?", text_format=Animal, max_output_tokens=100, temperature=1
    )
    assert isinstance(parsed.output_parsed, Animal)
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"
    loose = client.responses.create(
        model="tiny", input="Hi", text={"format": {"type": "json_object"}}, max_output_tokens=200, temperature=0
    )
    assert loose.output_text.startswith("{")


def test_a_text_that_can_go_no_further_is_an_error_of_its_own_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="no token may be chosen"):
        said(client, guided_grammar='root ::= "ab" rest\nrest ::= rest "c"')
    assert said(client, guided_regex="abc") == "abc"


def test_what_only_looks_like_a_reference_stays_as_it_is() -> None:
    """Inside constants and defaults everything is data; a property may be called like a keyword."""
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            "default": {"$ref": "#/$defs/enum"},
            "kept": {"const": {"$ref": "#/x"}, "default": {"$ref": "#/y"}},
            "chosen": {"enum": [{"$ref": "#/z"}]},
        },
        "$defs": {"enum": {"items": {"$ref": "#/$defs/enum"}}},
    }
    body = ChatRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "?"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            "tool_choice": "required",
        }
    )
    grammar = forced_grammar(body)
    assert grammar is not None
    moved = json.loads(grammar.text)["items"]["anyOf"][0]["properties"]["arguments"]
    place = "#/items/anyOf/0/properties/arguments/$defs/enum"
    assert moved["properties"]["default"] == {"$ref": place}
    assert moved["$defs"]["enum"]["items"] == {"$ref": place}
    assert moved["properties"]["kept"] == parameters["properties"]["kept"]
    assert moved["properties"]["chosen"] == parameters["properties"]["chosen"]
