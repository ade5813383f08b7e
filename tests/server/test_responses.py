"""The Responses API through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.server.running import RunningServer

OPTIONS: dict[str, Any] = {"model": "tiny", "max_output_tokens": 16, "temperature": 0.8}
SEED = {"seed": 3}


@pytest.fixture(scope="module")
def client(tiny: RunningServer) -> openai.OpenAI:
    return tiny.openai()


def test_a_response_is_what_the_chat_would_say(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **OPTIONS, input="Name three rivers.", instructions="Be brief.", extra_body=SEED, metadata={"a": "b"}
    )
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three rivers."}],
        max_tokens=16,
        temperature=0.8,
        seed=3,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 16
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.metadata == {"a": "b"}


def test_events_come_in_order_and_add_up(client: openai.OpenAI) -> None:
    whole = client.responses.create(**OPTIONS, input="Name three rivers.", extra_body=SEED)
    events = list(client.responses.create(**OPTIONS, input="Name three rivers.", extra_body=SEED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 16


def test_a_conversation_with_parts_calls_and_their_outputs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **OPTIONS,
        input=[
            {"role": "developer", "content": "Use the tools."},
            {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
            {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"zone": "UTC"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ],
        tools=[{"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}],
    )
    assert response.output_text is not None
    assert response.tools[0].name == "clock"


def test_log_probabilities_come_where_they_are_included(client: openai.OpenAI) -> None:
    response = client.responses.create(**OPTIONS, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert len(entries) == 16
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    "change",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"truncation": "auto"},
        {"reasoning": {"effort": "high"}},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "function_call", "call_id": "c"}]},
        {"tools": [{"type": "web_search"}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array", "contains": {}}}}},
    ],
)
def test_what_is_not_done_here_is_refused(client: openai.OpenAI, change: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**({**OPTIONS, "input": "Hi"} | change))
