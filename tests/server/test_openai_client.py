"""The official client against every route, streamed and whole."""

from __future__ import annotations

import openai
import pytest
from tests.server.running import RunningServer

PROMPT = "The quick brown fox jumps over"
CHAT = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture(scope="module")
def client(tiny: RunningServer) -> openai.OpenAI:
    return tiny.openai()


def test_models_are_listed_and_found(client: openai.OpenAI, tiny: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "outrider"
    assert set(tiny.http().get("/version").json()) == {"version"}


def test_a_stream_adds_up_to_the_whole_completion(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_says_all_the_time_what_was_used_if_asked(client: openai.OpenAI) -> None:
    always = {"include_usage": True, "continuous_usage_stats": True}
    options = {"model": "tiny", "max_tokens": 12, "temperature": 0.8, "seed": 5, "stream": True, "n": 2}
    for chunks in (
        list(client.completions.create(**options, prompt=PROMPT, stream_options=always)),
        list(client.chat.completions.create(**options, messages=CHAT, stream_options=always)),
    ):
        used = [chunk.usage.completion_tokens for chunk in chunks]
        assert used == sorted(used)
        assert 0 < used[0] < used[-1] == 24


def test_without_asking_no_chunk_lacks_a_choice(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["acceptance_length"] >= 1


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 20, "temperature": 0.8, "seed": 5}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_the_role_comes_with_the_first_token_and_not_before(client: openai.OpenAI) -> None:
    """Clients that measure take the first chunk with a choice for the first token."""
    options = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 6, "temperature": 0}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, n=2, stream=True)]
    assert [chunk.index for chunk in chunks if chunk.delta.role] == [0, 1]
    for number, chunk in enumerate(chunks):
        if chunk.delta.role:
            assert chunks[number + 1].index == chunk.index
            assert not chunks[number + 1].delta.role


def test_prompts_come_as_text_ids_and_lists_of_either(client: openai.OpenAI, tiny: RunningServer) -> None:
    ids = tiny.http().post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    expected = client.completions.create(prompt=PROMPT, **options).choices[0].text
    assert client.completions.create(prompt=ids, **options).choices[0].text == expected
    for prompts in ([PROMPT, PROMPT], [ids, ids]):
        answer = client.completions.create(prompt=prompts, **options)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, expected), (1, expected)]


def test_n_gives_independent_continuations_the_first_of_which_is_that_of_one(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 11}
    one = client.completions.create(**options)
    four = client.completions.create(**options, n=4)
    texts = [choice.text for choice in four.choices]
    assert texts[0] == one.choices[0].text
    assert len(set(texts)) == 4
    assert four.usage.completion_tokens == 48
    streamed = [""] * 4
    for chunk in client.completions.create(**options, n=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_several_prompts_and_n_are_counted_through(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["one", "two"], n=3, max_tokens=4, temperature=1.0, seed=1, echo=True
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text[:3] for choice in answer.choices] == ["one"] * 3 + ["two"] * 3


def test_stop_strings_end_the_text_and_are_left_out(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0.8, "seed": 2}
    text = client.completions.create(**options).choices[0].text
    stop = text[12:15]
    choice = client.completions.create(**options, stop=[stop, "never this"]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == stop
    streamed = client.completions.create(**options, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**options).choices[0]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset) == 5
    for own, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert own == max(top.values())
        assert len(top) == 3
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert [own for part in streamed for own in part.token_logprobs] == choice.logprobs.token_logprobs
    assert [at for part in streamed for at in part.text_offset] == choice.logprobs.text_offset


def test_log_probabilities_of_an_answer(client: openai.OpenAI) -> None:
    options = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    # PyTorch's sums depend on how many rows there are: neither may find the other's prompt in the cache.
    choice = client.chat.completions.create(**options, extra_body={"cache_salt": "whole"}).choices[0]
    assert len(choice.logprobs.content) == 5
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == choice.message.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True, extra_body={"cache_salt": "streamed"})
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == choice.logprobs.content


def test_echo_scores_the_prompt_without_generating(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens == 6
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("prompt", ["naïve 😀😃 日本語 and on", "<|im_start|>user\n😀<|im_end|>", "half a 😀"])
def test_offsets_of_an_echoed_prompt_are_places_in_the_text(client: openai.OpenAI, prompt: str) -> None:
    options = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3, "temperature": 0}
    answer = client.completions.create(**options, n=2)
    for choice in answer.choices:
        logprobs, prompt_tokens = choice.logprobs, answer.usage.prompt_tokens
        assert logprobs.text_offset[0] == 0
        assert logprobs.text_offset[prompt_tokens] == len(prompt)
        spelt = [
            (token, choice.text[offset : offset + len(token)])
            for token, offset in zip(logprobs.tokens[:prompt_tokens], logprobs.text_offset[:prompt_tokens], strict=True)
            if "\ufffd" not in token
        ]
        assert [token for token, _ in spelt] == [shown for _, shown in spelt]


def test_logit_bias_and_allowed_tokens_choose(client: openai.OpenAI) -> None:
    biased = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=3,
        temperature=0,
        logit_bias={"42": 100},
        extra_body={"return_token_ids": True},
    )
    assert biased.choices[0].model_extra["token_ids"] == [42] * 3
    forced = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, extra_body={"allowed_token_ids": [7], "return_token_ids": True}
    )
    assert forced.choices[0].model_extra["token_ids"] == [7] * 3


def test_every_token_says_where_it_came_from_and_together_they_are_the_text(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a b a b a b a b a b a b a b a b"}],
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_body={"return_token_origins": True},
    )
    text, pieces, origins = "", "", []
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for token in (choice.model_extra or {}).get("token_origins", ()):
            pieces += token["text"]
            origins.append(token["origin"])
        metrics = (chunk.model_extra or {}).get("metrics")
    assert pieces == text
    assert len(origins) == 40
    assert origins.count("accepted") == metrics["speculative_decoding"]["accepted_tokens"]


def test_tokenize_and_detokenize_are_inverse(tiny: RunningServer) -> None:
    http = tiny.http()
    told = http.post("/tokenize", json={"prompt": "Grüße, 世界!", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "Grüße, 世界!"}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    rendered = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert rendered == "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n"
