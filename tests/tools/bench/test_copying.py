"""Requests whose answers copy from the prompt are part of the package, varied, and really copied from."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from tests.cli.cli import chat_model

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.tools.bench.acceptance import AcceptanceConfig, measure, prepare, read_chats
from outrider.tools.bench.copying import copied_ngrams, copying_path, copying_requests
from outrider.tools.bench.texts import prompts_of


def test_there_are_many_requests_of_every_category_and_most_are_copied_from() -> None:
    requests = copying_requests()
    assert len({request.prompt for request in requests}) == len(requests)
    assert sum(request.copied >= 0.4 for request in requests) >= 40
    assert sum(request.copied < 0.4 for request in requests) >= 5
    assert min(Counter(request.category for request in requests).values()) >= 4
    assert len({request.category for request in requests[:8]}) == 8


def test_the_file_is_what_bench_acceptance_reads() -> None:
    chats = read_chats(copying_path())
    assert [chat.turns for chat in chats] == [(request.prompt,) for request in copying_requests()]


@pytest.mark.parametrize(
    ("prompt", "answer", "counts"),
    [
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 9], (1, 2)),
        ([1, 2, 3, 4], [1, 2, 3], (0, 0)),
        ([1], [1, 2, 3, 4], (0, 1)),
        ([1, 1, 1, 1], [1] * 6, (3, 3)),
    ],
)
def test_copied_ngrams_are_counted(prompt: list[int], answer: list[int], counts: tuple[int, int]) -> None:
    assert copied_ngrams(prompt, answer) == counts


def test_requests_are_chats_of_their_own_length_and_differ() -> None:
    number = len(copying_requests()) + 2
    prompts = prompts_of("copying", chat_model(), number=number, tokens=7)
    assert len({tuple(prompt) for prompt in prompts}) == number
    text = chat_model().tokenizer.decode(prompts[0])
    assert copying_requests()[0].prompt in text


@pytest.mark.slow
def test_the_default_model_copies_as_much_as_the_file_says() -> None:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    config = AcceptanceConfig(engine=EngineConfig(speculative_config=speculation), max_tokens=160, temperature=None)
    chosen = copying_requests()[:9]
    chats = [replace(chat, category=chat.source) for chat in read_chats(copying_path())[: len(chosen)]]
    report = measure(config, prepare(config), chats)
    json.dumps(report)
    found = report["greedy"]["categories"]
    for chat, request in zip(chats, chosen, strict=True):
        assert found[chat.source]["copied"] == pytest.approx(request.copied, abs=0.25)
