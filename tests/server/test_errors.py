"""What is refused, with which status, and in OpenAI's error object."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from tests.server.running import RunningServer
from tests.server.tiny_model import CONTEXT

from outrider.server.config import ServerConfig
from outrider.server.http.app import make_app
from outrider.server.observe.figures import Figures
from outrider.server.observe.metrics import Metrics

COMPLETION = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def refused(tiny: RunningServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = tiny.http().post(path, json=body)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 1000, "an answer does not repeat a large request"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 10**12}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"no token": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"seed": 1 << 70}, "seed"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1, 2], [1 << 40]]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": [[1]] * 65}, "prompt"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [5] * 4097}, "stop_token_ids"),
        ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids"),
        ({"priority": -1}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": {"text": "x"}}, None),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
def test_a_wrong_field_is_named(tiny: RunningServer, change: dict[str, Any], param: str | None) -> None:
    error = refused(tiny, "/v1/completions", COMPLETION | change)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert (error["param"] or "").split(".")[0] == param, error


LIMITED = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**30}}}


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 10**30},
        {"chat_template_kwargs": {"depth": 10**30}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": LIMITED}}]},
        {
            "messages": [
                *CHAT["messages"],  # type: ignore[misc]
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": f'{{"x": {"1" * 5000}}}'}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "done"},
            ],
            "max_tokens": 1,
        },
    ],
    ids=["top_k", "variable", "tool", "call"],
)
def test_large_numbers_are_taken_where_they_mean_something(tiny: RunningServer, change: dict[str, Any]) -> None:
    answer = tiny.http().post("/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def test_more_tokens_at_least_than_there_is_room_for_are_refused(tiny: RunningServer) -> None:
    for least in (CONTEXT, 10**30):
        body = {"messages": CHAT["messages"], "min_tokens": least}
        assert refused(tiny, "/v1/chat/completions", body)["code"] == "context_length_exceeded"


def test_an_unknown_field_is_refused_with_a_guess(tiny: RunningServer) -> None:
    error = refused(tiny, "/v1/chat/completions", CHAT | {"max_token": 3})
    assert error["code"] == "unknown_field"
    assert "did you mean 'max_tokens'" in error["message"]
    assert "refused" in refused(tiny, "/v1/completions", COMPLETION | {"something_new": {}})["message"]


def test_what_clients_send_routinely_is_accepted(tiny: RunningServer) -> None:
    routine = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "n": None, "stop": None}
    routine |= {"use_beam_search": False, "length_penalty": 1.0, "best_of": 1}
    # vllm-router adds these to every request.
    routine |= {"no_stop_trim": False, "return_hidden_states": False}
    chat = CHAT | {"include_reasoning": True, "separate_reasoning": True, "stream_reasoning": True}
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", chat)):
        assert tiny.http().post(path, json=body | routine).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"use_beam_search": True},
        {"length_penalty": 0.8},
        {"verbosity": "low"},
        {"best_of": 2},
        {"no_stop_trim": True},
        {"return_hidden_states": True},
        {"include_reasoning": False},
    ],
)
def test_what_is_not_done_is_refused_with_a_way_out(tiny: RunningServer, change: dict[str, Any]) -> None:
    error = refused(tiny, "/v1/chat/completions", CHAT | change)
    assert (error["code"], error["param"]) == ("not_available", next(iter(change)))


def test_how_much_to_think_reaches_the_template(tiny: RunningServer) -> None:
    def prompt_tokens(**more: Any) -> int:
        answer = tiny.http().post("/v1/chat/completions", json=CHAT | more)
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["prompt_tokens"]
        return tokens

    assert prompt_tokens(reasoning_effort="low") > prompt_tokens()
    assert prompt_tokens(reasoning_effort="low") == prompt_tokens(chat_template_kwargs={"reasoning_effort": "low"})
    refused(tiny, "/v1/chat/completions", CHAT | {"reasoning_effort": "very much"})


def test_an_unknown_model_is_not_found(tiny: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        tiny.openai().chat.completions.create(model="gpt-5", messages=CHAT["messages"])
    assert caught.value.code == "model_not_found"
    assert "tiny" in caught.value.message


def test_a_prompt_that_is_too_long_says_by_how_much(tiny: RunningServer) -> None:
    error = refused(tiny, "/v1/completions", COMPLETION | {"prompt": [5] * (CONTEXT - 4), "max_tokens": 14})
    assert error["code"] == "context_length_exceeded"
    assert f"{CONTEXT} tokens" in error["message"]
    assert "10 too many; shorten the prompt or lower max_tokens" in error["message"]
    assert error["param"] == "prompt"
    assert refused(tiny, "/v1/completions", COMPLETION | {"prompt": "a b " * CONTEXT})["param"] == "prompt"
    error = refused(tiny, "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a b " * CONTEXT}]})
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith("shorten the prompt")
    assert error["param"] == "messages"


def test_the_field_that_asks_for_too_much_is_named(tiny: RunningServer) -> None:
    error = refused(tiny, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21})
    assert error["param"] == "top_logprobs"
    error = refused(tiny, "/v1/chat/completions", CHAT | {"messages": []})
    assert error["message"] == "messages: list should have at least 1 item, not 0"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"prompt": "x", "metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", "nested"),
        (b"[]", "body"),
        (b"", "body"),
    ],
)
def test_a_body_that_is_no_request_is_refused(tiny: RunningServer, content: bytes, words: str) -> None:
    answer = tiny.http().post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_body_of_another_type_is_refused(tiny: RunningServer) -> None:
    """A form on some web page could send it without asking."""
    answer = tiny.http().post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


def test_routes_that_are_not_there(tiny: RunningServer) -> None:
    assert tiny.http().get("/v1/engines").json()["error"]["code"] == "not_found"
    assert tiny.http().get("/v1/completions").status_code == 405
    assert tiny.http().post("/admin/drain").status_code == 404


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"guided_json": {"description": "x" * 70_000}}, "bytes"),
        ({"guided_json": "{"}, "valid JSON"),
        ({"guided_json": '{"const": "\\ud800"}'}, "valid JSON"),
        ({"guided_json": f'{{"const": {"1" * 5000}}}'}, "valid JSON"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "more than once"),
        ({"response_format": {"type": "json_schema"}}, "needs a schema"),
        ({"guided_regex": "(a"}, "parenthesis that is not closed"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems cannot be enforced"),
        ({"guided_json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "contains itself without end"),
        ({"guided_json": {"properties": {str(n): {"type": "string"} for n in range(5000)}}}, "more than"),
        ({"guided_grammar": 'start ::= "x"'}, "root"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_wrong_form_is_refused(tiny: RunningServer, change: dict[str, Any], words: str) -> None:
    assert words in refused(tiny, "/v1/chat/completions", CHAT | change)["message"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "robot", "content": "x"}, "role"),
        ({"role": "user"}, "no content"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "only the assistant"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(tiny: RunningServer, message: dict[str, Any], words: str) -> None:
    assert words in refused(tiny, "/v1/chat/completions", CHAT | {"messages": [message]})["message"]


def test_a_template_that_does_not_end_is_interrupted_and_others_are_served(tiny: RunningServer) -> None:
    error = refused(tiny, "/v1/chat/completions", CHAT | {"chat_template_kwargs": {"slow": True}})
    assert "within 1 s" in error["message"]
    assert tiny.http().post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "not a name"])
def test_template_variables_do_not_replace_the_request(tiny: RunningServer, name: str) -> None:
    error = refused(tiny, "/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: []}})
    assert "chat_template_kwargs" in error["message"]


def test_a_foreign_host_header_is_refused_without_a_key(tiny: RunningServer) -> None:
    """A web page whose name is made to point at this machine sends its own."""
    answer = tiny.http().get("/v1/models", headers={"Host": "evil.example"})
    assert answer.status_code == 403
    assert tiny.http().get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


def test_who_meets_a_bug_of_ours_is_told_that_the_connection_ends() -> None:
    """The HTTP server closes it, since it takes the exception for its own."""
    config = ServerConfig(api_keys=("k",))
    service: Any = SimpleNamespace(config=config, metrics=Metrics(config.metrics_prefix, Figures(), "m"))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            # No Service is there, which is nothing that a route expects.
            return await client.get("/ready", headers={"Authorization": "Bearer k"})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["Connection"] == "close"
