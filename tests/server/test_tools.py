"""Tools from the definition to the call, over HTTP, with a model that is made to call."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tests.server.facts import FACTS
from tests.server.running import RunningServer
from tests.server.tiny_model import text_worker

from outrider.sampling import SamplingParams
from outrider.server.front.conversation import check_tool_choice
from outrider.server.front.problems import Problem
from outrider.server.front.tool_calls import forced_grammar
from outrider.server.front.totals import Totals
from outrider.server.messages import Delta, Submit
from outrider.server.protocol.chat import ChatRequest
from outrider.server.protocol.responses import ResponsesRequest
from outrider.server.routes.chat import ChatWriter
from outrider.server.routes.responses import ResponseWriter
from outrider.server.routes.responses_input import as_chat
from outrider.server.text_process.messages import Render

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
ASKED = [{"role": "user", "content": "How is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def client(tiny: RunningServer) -> openai.OpenAI:
    return tiny.openai()


def rendered(tiny: RunningServer, **body: Any) -> str:
    http = tiny.http()
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_definitions_calls_and_results_reach_the_template(tiny: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    text = rendered(tiny, messages=messages, tools=[WEATHER])
    assert '"name": "weather"' in text.partition("</tools>")[0]
    # Arguments are an object there, not a text in a text.
    assert '{"name": "weather", "arguments": {"town": "Oslo"}}' in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text


def test_without_a_choice_tools_are_not_shown(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 1}
    plain = client.chat.completions.create(**options).usage.prompt_tokens
    assert client.chat.completions.create(**options, tools=[WEATHER]).usage.prompt_tokens > plain + 20
    without = client.chat.completions.create(**options, tools=[WEATHER], tool_choice="none")
    assert without.usage.prompt_tokens == plain


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [{"type": "function", "function": {"name": "no spaces please"}}]},
        {"tools": [WEATHER] * 129},
        {"tools": [WEATHER, WEATHER]},
        {"tools": "weather"},
        {"tools": [{}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
        {"tools": [WEATHER], "tool_choice": "perhaps"},
        {"tools": [WEATHER], "parallel_tool_calls": "no"},
    ],
)
def test_impossible_tools_are_refused(client: openai.OpenAI, change: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASKED, **change)
    assert caught.value.param is not None
    assert caught.value.param.startswith(("tools", "tool_choice", "parallel_tool_calls"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_cannot_be_forced_is_refused_with_a_way_out(choice: Any) -> None:
    body = ChatRequest.model_validate({"messages": ASKED, "tools": [WEATHER], "tool_choice": choice})
    check_tool_choice(body, FACTS)
    with pytest.raises(Problem, match="use tool_choice 'auto'") as caught:
        check_tool_choice(body, msgspec.structs.replace(FACTS, supports_grammars=False))
    assert (caught.value.param, caught.value.code) == ("tool_choice", "not_available")


@pytest.mark.parametrize(
    "result", [{"content": "rain"}, {"content": "rain", "tool_call_id": "c2"}, {"content": None, "tool_call_id": "c1"}]
)
def test_results_must_answer_a_call(client: openai.OpenAI, result: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: list[Any] = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    right = {"role": "tool", "content": "rain", "tool_call_id": "c1"}
    client.chat.completions.create(model="tiny", messages=[*messages, right], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=r"messages\[2\]"):
        client.chat.completions.create(model="tiny", messages=[*messages, {"role": "tool", **result}])
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].*send the assistant's message"):
        client.chat.completions.create(model="tiny", messages=[*ASKED, right])


def test_a_template_without_tools_gets_them_in_the_messages() -> None:
    """As the default model's, whose template knows roles and contents only."""
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    own = text_worker(template)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    order = Render(
        messages=[
            {"role": "system", "content": "Be kind."},
            *ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "rain"},
        ],
        tools=[WEATHER],
        tokens_max=4096,
    )
    text = own.tokenizer.decode(own.carry_out(order).token_ids, skip_special_tokens=False)  # type: ignore[union-attr]
    assert text.startswith("[system] Be kind.\n\nYou may call functions")
    assert '"description": "The weather in a town"' in text
    assert f"[assistant] {CALL}" in text
    assert "[user] <tool_response>\nrain\n</tool_response>" in text


def test_a_last_message_can_be_continued() -> None:
    own = text_worker("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}")
    messages = [*ASKED, {"role": "assistant", "content": "It is"}]
    answer = own.carry_out(Render(messages=messages, continue_last=True, add_generation_prompt=False, tokens_max=99))
    assert own.tokenizer.decode(answer.token_ids).endswith("<assistant>It is")  # type: ignore[union-attr]


# ---- from what the model writes to what the client gets --------------------------------------------


def written(text: str, *, stream: bool, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Chunks, or the whole answer, where the model writes `text` three characters at a time."""
    body = ChatRequest.model_validate({"messages": ASKED, "tools": [WEATHER], "stream": stream, **fields})
    order = Submit(request_id="r", prompt_token_ids=[1], params=SamplingParams(), arrival_s=0.0)
    writer, totals = ChatWriter(None, body, order, name="r", model="m"), Totals([order])  # type: ignore[arg-type]
    chunks = list(writer.first()) if stream else []
    for start in range(0, len(text), 3):
        piece = text[start : start + 3]
        finish = "stop" if start + 3 >= len(text) else None
        delta = Delta(
            request_id="r", index=0, text=piece, token_ids=[1], pieces=[piece], origins="p", finish_reason=finish
        )
        chunks += writer.delta(0, delta, totals)
    decoded = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]
    return decoded, {} if stream else writer.whole(totals)


def test_calls_in_the_text_become_tool_calls() -> None:
    _, answer = written(f"Let me look.\n{CALL}\n{CALL}", stream=False)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    names = [(call["type"], call["function"]) for call in choice["message"]["tool_calls"]]
    assert names == [("function", {"name": "weather", "arguments": '{"town": "Oslo"}'})] * 2
    assert written(CALL, stream=False)[1]["choices"][0]["message"]["content"] is None
    _, one = written(f"{CALL}{CALL}", stream=False, parallel_tool_calls=False)
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    _, none = written(CALL, stream=False, tool_choice="none")
    assert none["choices"][0]["message"]["content"] == CALL
    assert none["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_calls_are_streamed_as_they_are_written(parallel: bool, listed: bool) -> None:
    """The name first, then arguments in pieces, as the official client puts them together."""
    call = json.dumps({"name": "weather", "arguments": {"town": "Oslo"}})
    text = f"<tool_call>[{call}, {call}]</tool_call>" if listed else f"{CALL}\n{CALL}"
    chunks, _ = written(f"Let me look.\n{text}", stream=True, parallel_tool_calls=parallel)
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    (choice,) = state.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [(made.function.name, made.function.arguments) for made in choice.message.tool_calls or ()] == [
        ("weather", '{"town": "Oslo"}')
    ] * (1 + parallel)
    deltas = [made for chunk in chunks for made in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [made["function"]["name"] for made in deltas if "id" in made] == ["weather"] * (1 + parallel)
    assert len({made["id"] for made in deltas if "id" in made}) == 1 + parallel
    assert sum(made["index"] == 0 for made in deltas) > 3


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "function", "function": {"name": "weather"}}, '{"town": "Oslo"}'),
        ("required", '[{"name": "weather", "arguments": {"town": "Oslo"}}]'),
    ],
)
def test_what_a_grammar_forces_becomes_a_call(choice: Any, text: str) -> None:
    _, answer = written(text, stream=False, tool_choice=choice)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"town": "Oslo"}'}
    body = ChatRequest.model_validate({"messages": ASKED, "tools": [WEATHER], "tool_choice": choice})
    grammar = forced_grammar(body)
    assert grammar is not None
    assert '"town"' in grammar.text


@pytest.mark.parametrize(("parallel", "most"), [(None, None), (True, None), (False, 1)])
def test_who_wants_one_call_at_a_time_leaves_room_for_one(parallel: bool | None, most: int | None) -> None:
    """Further ones would be left out, after the client has waited for them."""
    asked = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": parallel}
    grammar = forced_grammar(ChatRequest.model_validate(asked))
    assert grammar is not None
    assert json.loads(grammar.text).get("maxItems") == most


def test_the_responses_api_gives_calls_as_items() -> None:
    body = ResponsesRequest.model_validate(
        {"input": "?", "stream": True, "tools": [{"type": "function", "name": "weather"}]}
    )
    order = Submit(request_id="r", prompt_token_ids=[1], params=SamplingParams(), arrival_s=0.0)
    writer = ResponseWriter(None, body, as_chat(body), name="r", model="m")  # type: ignore[arg-type]
    totals = Totals([order])
    delta = Delta(
        request_id="r",
        index=0,
        text=f"Let me look. {CALL}",
        token_ids=[1],
        pieces=[f"Let me look. {CALL}"],
        origins="p",
        finish_reason="stop",
    )
    events = [*writer.first(), *writer.delta(0, delta, totals), *writer.last(totals)]
    told = [json.loads(event.partition(b"data: ")[2]) for event in events]
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    for event in told:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    message, call = told[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Let me look."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"town": "Oslo"}')
