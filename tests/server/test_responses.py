"""The Responses API through the official client."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.server.running import RunningServer
from tests.server.tiny_model import real_text

from outrider.sampling import SamplingParams
from outrider.server.front.problems import Problem
from outrider.server.front.tokens import TokenTexts
from outrider.server.front.totals import Totals
from outrider.server.messages import Delta, Scored, Submit
from outrider.server.protocol.responses import ResponsesRequest
from outrider.server.routes.responses import ResponseWriter
from outrider.server.routes.responses_input import as_chat

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


STRICT = TypeAdapter(ResponseStreamEvent)


def test_every_event_has_the_form_that_the_client_declares(tiny: RunningServer) -> None:
    """The client itself takes anything: what it lacks would show only where somebody reads it."""
    body = {"input": "Hi", "max_output_tokens": 6, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    tools = [{"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}]
    asked = body | {"tools": tools, "instructions": "Be brief.", "user": "somebody", "stream": True}
    with tiny.http().stream("POST", "/v1/responses", json=asked) as answer:
        lines = list(answer.iter_lines())
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [
        event["type"] for event in told
    ]
    for event in told:
        assert STRICT.validate_python(event).type == event["type"]
    whole = Response.model_validate(tiny.http().post("/v1/responses", json=body).json())
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + 6


def test_what_was_answered_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(**OPTIONS, input="Hi")
    more: list[Any] = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "And?"}]
    second = client.responses.create(**OPTIONS, input=more)
    assert second.usage.input_tokens > first.usage.input_tokens + 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is kept between requests, so send everything"),
        ({"conversation": "conv_1"}, "nothing is kept between requests"),
        ({"background": True}, "stream it"),
        ({"truncation": "auto"}, "leave out of the input"),
        ({"text": {"verbosity": "low"}}, "instructions"),
        ({"reasoning": {"effort": "high"}}, "leave it out"),
        ({"top_logprobs": 3}, "needs include"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "no function_call before it"),
        ({"input": []}, "at least one message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "needs name and call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "function_call_output"),
        ({"instructions": ["a"]}, "string"),
        ({"include": ["reasoning.encrypted_content"]}, "logprobs"),
        ({"stop": "x"}, "not known here"),
        ({"tools": [{"type": "web_search"}]}, "function"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"contains": {}}}}}, "contains"),
    ],
)
def test_what_is_not_done_here_is_refused_with_a_way_out(
    client: openai.OpenAI, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.responses.create(**{**OPTIONS, "input": "Hi"}, extra_body=change)
    assert (caught.value.param or next(iter(change))).partition(".")[0] == next(iter(change))


@pytest.mark.parametrize("include", [["message.output_text.logprobs"], None])
def test_tokens_without_a_text_of_their_own_are_told_too(include: list[str] | None) -> None:
    """The first half of a character, and the token that ends the text."""
    fields = {"input": "?", "stream": True, "include": include, "return_token_origins": True}
    body = ResponsesRequest.model_validate(fields)
    service: Any = SimpleNamespace(token_texts=TokenTexts(real_text().tokenizer))
    writer = ResponseWriter(service, body, as_chat(body), name="r", model="m")
    totals = Totals([Submit(request_id="r", prompt_token_ids=[1], params=SamplingParams(), arrival_s=0.0)])
    told = []
    for token, piece in ((10, "a"), (11, ""), (12, "\u00e9"), (13, ""), (2, "")):
        delta = Delta(
            request_id="r",
            index=0,
            text=piece,
            token_ids=[token],
            pieces=[piece],
            origins="p",
            logprobs=[Scored(token=token, logprob=-float(token), top=[])],
            finish_reason="stop" if token == 2 else None,
        )
        told += [json.loads(event.partition(b"data: ")[2]) for event in writer.delta(0, delta, totals)]
    texts = [event for event in told if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in texts] == ["a", "\u00e9", ""]
    assert [[token["id"] for token in event["token_origins"]] for event in texts] == [[10], [11, 12], [13, 2]]
    (message,) = writer.whole(totals)["output"]
    expected = [] if include is None else [-10.0, -11.0, -12.0, -13.0, -2.0]
    assert [entry["logprob"] for event in texts for entry in event["logprobs"]] == expected
    assert [entry["logprob"] for entry in message["content"][0]["logprobs"]] == expected


def test_a_stream_that_fails_ends_with_an_event_of_the_type_error() -> None:
    body = ResponsesRequest.model_validate({"input": "?", "stream": True})
    service: Any = SimpleNamespace(token_texts=TokenTexts(real_text().tokenizer))
    writer = ResponseWriter(service, body, as_chat(body), name="r", model="m")
    failed, error = list(writer.failed(Problem("no", status=503, type="server_error", code="unavailable")))
    assert error.startswith(b"event: error\n")
    told = json.loads(error.partition(b"data: ")[2])
    assert (told["type"], told["code"], told["message"]) == ("error", "unavailable", "no")
    assert json.loads(failed.partition(b"data: ")[2])["type"] == "response.failed"
