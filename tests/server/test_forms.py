"""Output in a given form, asked for in each of the ways that clients know; a random model would say none of it."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from tests.server.running import RunningServer

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
        model="tiny",
        messages=CHAT,
        tools=[tool],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=150,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "note"
    assert Animal.model_validate(json.loads(call.function.arguments))


def test_a_slow_grammar_is_refused_and_others_are_served(tiny: RunningServer, client: openai.OpenAI) -> None:
    """Longer than the two seconds that a grammar has unless the server is told otherwise."""
    pattern = {"type": "string", "pattern": "(a|b|c){1,300}x(d|e){1,300}"}
    schema = {"type": "object", "properties": {f"p{number}": pattern for number in range(200)}}
    with pytest.raises(openai.BadRequestError, match="took longer than 2 s to compile"):
        said(client, guided_json=schema)
    assert said(client, guided_regex="abc") == "abc"
