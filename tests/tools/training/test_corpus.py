"""Corpora: what is written is read again, and it is what the target would say."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny import byte_tokenizer
from tests.tools.training.tiny import greedy_streams, settings_for, tiny_target, write_corpus

from outrider.errors import ConfigError
from outrider.models.chat import ChatTemplate
from outrider.tools.training.corpus import (
    CorpusNote,
    Streams,
    read_corpus,
    read_note,
    shared_prompts,
    write_note,
    write_shard,
)
from outrider.tools.training.generate import Lockstep
from outrider.tools.training.make_corpus import CorpusSettings, openings_of, write_conversations, write_greedy_answers
from outrider.tools.training.pooling import StreamSource, best_tokens
from outrider.tools.training.prompts import ChatText, PromptLine, read_prompts
from outrider.tools.training.run import train_for

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}a"


def chat_text() -> ChatText:
    tokenizer = byte_tokenizer()
    (end,) = tokenizer.encode("|", add_special_tokens=False)
    return ChatText(tokenizer=tokenizer, template=ChatTemplate(TEMPLATE, source="tiny"), eos_ids=(end,))


def quiet(_line: str) -> None:
    pass


def test_streams_are_read_as_they_were_written(tmp_path: Path) -> None:
    first, second = greedy_streams(4), greedy_streams(3, seed=1)
    write_shard(tmp_path, first)
    write_shard(tmp_path, second)
    found = read_corpus(tmp_path, vocab_size=256)
    assert np.array_equal(found.tokens, np.concatenate([first.tokens, second.tokens]))
    assert np.array_equal(found.roles, np.concatenate([first.roles, second.roles]))
    one = read_corpus(tmp_path / "toks_1.npy", vocab_size=256)
    assert np.array_equal(one.tokens, second.tokens)


def test_ids_above_16_bits_survive(tmp_path: Path) -> None:
    streams = greedy_streams(4)
    wide = Streams(tokens=streams.tokens + 100_000, roles=streams.roles)
    write_shard(tmp_path, wide)
    assert np.array_equal(read_corpus(tmp_path, vocab_size=128_000).tokens, wide.tokens)


def test_every_stream_comes_once_an_epoch_and_held_out_ones_never(tmp_path: Path) -> None:
    write_corpus(tmp_path, 8)
    source = StreamSource((tmp_path,), vocab_size=256, holdout=2, seed=0, watch=True)
    assert sorted(source.next(6).tolist()) == [2, 3, 4, 5, 6, 7]
    assert len(source.held_out) == 2
    assert len(source.trained) == 6
    write_corpus(tmp_path, 8)
    assert sorted(source.next(8).tolist()) == list(range(8, 16))
    assert sorted(source.next(14).tolist()) == list(range(2, 16))


def test_answers_are_what_the_target_would_say(tmp_path: Path) -> None:
    settings = CorpusSettings(output=tmp_path, length=40, streams=3, count=5, temperatures=((0.0, 1.0),), source="us")
    prompts = [PromptLine(turns=(text,), category="x") for text in ("hello", "why?", "ab")]
    assert write_conversations(settings, tiny_target(), chat_text(), prompts, quiet) == 5
    streams = read_corpus(tmp_path, vocab_size=256)
    assert streams.tokens.shape == (5, 40)
    states = tiny_target().states(torch.from_numpy(streams.tokens.astype(np.int64)), (0,))
    best = best_tokens(tiny_target(), states.final).numpy()
    assert streams.roles.sum() > 50
    assert np.array_equal(streams.tokens[streams.roles], best[streams.roles])
    text = chat_text()
    known = {tuple(text.encode([{"role": "user", "content": line.turns[0]}])) for line in prompts}
    ends = streams.roles.argmax(axis=1)
    assert {tuple(row[:end].tolist()) for row, end in zip(streams.tokens, ends, strict=True)} <= known
    assert read_note(tmp_path) == CorpusNote(source="us", written_by=tiny_target().name)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and invented questions are x until the next position that is a multiple of 5."""

    def sample(lockstep: Lockstep, logits: torch.Tensor) -> torch.Tensor:
        (letter,) = chat_text().tokenizer.encode("x", add_special_tokens=False)
        ends = int(lockstep.position + 1) % 5 == 0
        return torch.full((len(logits),), lockstep.conversation.end if ends else letter)

    monkeypatch.setattr(Lockstep, "_sample", sample)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("streams", [1, 2, 5])
def test_given_turns_are_asked_before_any_is_invented(streams: int, tmp_path: Path) -> None:
    settings = CorpusSettings(output=tmp_path, length=80, streams=streams)
    given = [("hello", "and then?", "why"), ("7+5", "really?"), ("ab",)]
    prompts = [PromptLine(turns=turns, category="y") for turns in given]
    text = chat_text()
    write_conversations(settings, tiny_target(), text, prompts, quiet)
    found = read_corpus(tmp_path, vocab_size=256)
    assert len(found) == 3
    for turns in given:
        rows = [row for row in zip(found.tokens, found.roles, strict=True) if begins(row[0], f"u{turns[0]}|a")]
        ((tokens, roles),) = rows
        said = text.tokenizer.decode(tokens.tolist())
        parts = said.split("|")
        assert tuple(part[1:] for part in parts[::2][: len(turns)]) == turns
        # Then they are invented, and answers stand between all of them.
        assert set(parts[::2][len(turns)]) == {"u", "x"}
        assert all(re.fullmatch("ax*", part) for part in parts[1::2])
        answers = [match.span(1) for match in re.finditer(r"a(x*\|?)", re.sub(r"u[^|]*", hidden, said))]
        wanted = np.zeros(len(tokens), dtype=bool)
        for start, stop in answers:
            wanted[start:stop] = True
        assert np.array_equal(roles, wanted)


def begins(tokens: np.ndarray, text: str) -> bool:
    return chat_text().tokenizer.decode(tokens.tolist()).startswith(text)


def hidden(question: re.Match[str]) -> str:
    return "?" * len(question[0])


@pytest.mark.usefixtures("brief")
def test_a_share_of_the_conversations_begins_with_an_invented_question(tmp_path: Path) -> None:
    text = chat_text()
    prompts = [PromptLine(turns=(f"prompt {number}",), category="y") for number in range(10)]
    settings = CorpusSettings(output=tmp_path, length=40, count=20, invented=0.5)
    openings = openings_of(settings, text, prompts)
    own = [one for one in openings if one.invents]
    assert 4 < len(own) < 16
    assert {tuple(one.ids) for one in own} == {tuple(text.tokenizer.encode("u", add_special_tokens=False))}
    # Every prompt comes before any comes again.
    rest = [tuple(one.ids) for one in openings if not one.invents][:10]
    assert len(set(rest)) == len(rest)
    write_conversations(replace(settings, invented=1.0, count=2), tiny_target(), text, prompts, quiet)
    for tokens in read_corpus(tmp_path, vocab_size=256).tokens:
        assert begins(tokens, "uxxxx|axxx|uxxx|axxx|")
    with pytest.raises(ConfigError, match="fraction between 0 and 1"):
        replace(settings, invented=1.5)


@pytest.mark.usefixtures("brief")
def test_a_share_of_the_conversations_begins_with_first_words_that_the_target_finishes(tmp_path: Path) -> None:
    text = chat_text()
    said = [" ".join(f"{letter}{number}" for number in range(10)) for letter in "bcd"] + ["short"]
    prompts = [PromptLine(turns=(one,), category="y") for one in said]
    settings = CorpusSettings(output=tmp_path, length=64, count=800, invented=0.25, begun=0.5)
    openings = openings_of(settings, text, prompts)
    begun = [text.tokenizer.decode(list(one.ids)) for one in openings if one.invents and len(one.ids) > 1]
    assert 320 < len(begun) < 480
    assert 140 < sum(one.invents and len(one.ids) == 1 for one in openings) < 260
    # Whole words, never more than half of a prompt, and of every length up to that.
    beginnings = {" ".join(one.split(" ")[:words]) for one in said[:3] for words in range(1, 6)} | {"short"}
    assert {one.removeprefix("u") for one in begun} == beginnings
    # Where others stand in for prompts, none of the prompts is left out.
    whole = [text.tokenizer.decode(list(one.ids)) for one in openings if not one.invents]
    assert all(set(whole[at : at + 4]) == {f"u{one}|a" for one in said} for at in range(0, len(whole) - 3, 4))
    write_conversations(replace(settings, begun=1.0, invented=0.0, count=3), tiny_target(), text, prompts, quiet)
    for tokens in read_corpus(tmp_path, vocab_size=256).tokens:
        assert re.match(r"u(short|([bcd])0( \2[1-4])*)x*\|ax+\|ux+\|a", text.tokenizer.decode(tokens.tolist()))


@pytest.mark.usefixtures("brief")
def test_first_words_of_any_prompt_leave_room_for_the_rest(tmp_path: Path) -> None:
    settings = CorpusSettings(output=tmp_path, length=64, count=200, begun=1.0)

    def beginnings(*said: str) -> set[str]:
        text, prompts = chat_text(), [PromptLine(turns=(one,), category="y") for one in said]
        openings = openings_of(settings, text, prompts)
        assert max(len(one.ids) for one in openings) <= 48
        write_conversations(replace(settings, count=3), tiny_target(), text, prompts, quiet)
        return {text.tokenizer.decode(list(one.ids)).removeprefix("u") for one in openings}

    # Words may stand on lines of their own, or behind blanks, and a text without any may be longer than a stream.
    assert beginnings("  one\ntwo\t three  four") == {"one", "one\ntwo"}
    assert beginnings("short", "b" * 500) == {"short", "b" * 47}
    # No more than the first eight, however long the prompt; blanks alone are nothing to begin with.
    long = " ".join("c" for _ in range(20))
    assert beginnings(long, "  \n ") == {" ".join("c" * words) for words in range(1, 9)}
    with pytest.raises(ConfigError, match="no prompt has a word"):
        beginnings("  ", "\n")


def test_greedy_answers_have_a_category_each_and_end_in_time(tmp_path: Path) -> None:
    prompts = [PromptLine(turns=("hello", "and then?"), category="talk"), PromptLine(turns=("7+5",), category="sums")]
    settings = CorpusSettings(output=tmp_path, length=64)
    assert write_greedy_answers(settings, tiny_target(), chat_text(), prompts, quiet, tokens=10) == 3
    streams = read_corpus(tmp_path, vocab_size=256)
    assert json.loads((tmp_path / "categories.json").read_text()) == ["talk", "sums", "talk"]
    assert (streams.roles.sum(axis=1) <= 10).all()
    result = train_for(
        settings_for(tmp_path, data=(tmp_path,), evaluation=tmp_path, steps=1), tiny_target(), report=quiet
    )
    assert result is not None
    assert set(result["categories"]) == {"all", "talk", "sums"}


def test_a_batch_that_takes_long_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.tools.training.make_corpus.PROGRESS_INTERVAL_S", 0.0)
    told: list[str] = []
    prompts = [PromptLine(turns=("hello",), category="talk")]
    write_greedy_answers(
        CorpusSettings(output=tmp_path, length=64), tiny_target(), chat_text(), prompts, told.append, tokens=10
    )
    assert told[0] == "writing streams of 64 tokens on a CPU: 1 at once"
    assert "token 20 of 64" in told


def test_prompts_are_read_from_lines_plain_or_zipped(tmp_path: Path) -> None:
    lines = '{"prompt": "a\\u2028b"}\n\n{"turns": ["c", "d"], "category": "two"}\n'
    (tmp_path / "plain.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "zipped.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("plain.jsonl", "zipped.jsonl.gz"):
        first, second = read_prompts(tmp_path / name)
        assert first == PromptLine(turns=("a\u2028b",), category="all")
        assert second == PromptLine(turns=("c", "d"), category="two")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", b"", "has no prompts"),
        ("a.jsonl", b"{", "line 1 is not valid JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not valid JSON"),
        ("a.jsonl", b'{"prompt": "a", "category": ' + b"9" * 5000 + b"}", "line 1 is not valid JSON"),
        ("a.jsonl", b"\n[1]", "line 2 is not a JSON object"),
        ("a.jsonl", b'{"turns": []}', 'neither "prompt" nor "turns"'),
        ("a.jsonl.gz", b"not zipped", "cannot be read"),
        ("a.jsonl", b"\xff", "cannot be read"),
    ],
)
def test_broken_prompts_are_refused(name: str, content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": -1},
        {"seed": 1 << 63},
        {"question_temperature": -0.5},
        {"question_temperature": float("nan")},
        {"temperatures": ()},
        {"temperatures": ((float("nan"), 1.0),)},
        {"temperatures": ((0.5, float("inf")),)},
        {"invented": 1.5},
        {"begun": -0.1},
        {"invented": 0.6, "begun": 0.6},
    ],
)
def test_settings_of_a_corpus_that_mean_nothing_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        CorpusSettings(output=tmp_path, **changes)


# ---- the model card's data section ---------------------------------------------------------------------


def card(directory: Path, **changes: object) -> str:
    settings = settings_for(directory, steps=1, **changes)
    train_for(settings, tiny_target(), report=quiet, fresh=True)
    return (settings.output / "README.md").read_text(encoding="utf-8")


def test_the_card_says_of_the_data_what_the_data_says(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    text = card(tmp_path)
    assert "8 streams of 48 tokens" in text
    assert "Where the data comes from was not recorded." in text
    assert "license:" not in text
    assert "## Licence" not in text
    write_note(tmp_path / "corpus", CorpusNote(source="Questions from a quiz", licence="CC0", written_by="tiny-0"))
    text = card(tmp_path)
    assert "- Questions from a quiz; written by tiny-0; licence: CC0" in text
    text = card(tmp_path, data_source="Another quiz", data_licence="MIT", licence="apache-2.0")
    assert "- Another quiz; licence: MIT" in text
    assert "Questions from a quiz" not in text
    assert 'license: "apache-2.0"' in text


def test_the_card_says_whether_evaluation_prompts_were_trained_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    write_corpus(tmp_path / "other", 4, seed=5)
    assert "No evaluation prompt begins a training stream." in card(tmp_path, evaluation=tmp_path / "other")
    assert "8 evaluation streams begin as training streams do." in card(tmp_path, evaluation=tmp_path / "corpus")
    assert shared_prompts(greedy_streams(4, seed=5), greedy_streams(8)) == 0
