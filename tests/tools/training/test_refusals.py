"""What cannot be trained is refused in one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.cli import Done, run_main
from tests.tools.training.tiny import greedy_streams, settings_for, tiny_target, write_corpus

from outrider.errors import ConfigError
from outrider.tools.training.corpus import Streams, read_corpus, write_shard
from outrider.tools.training.run import train_for


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`outrider train dflash` with a corpus in place; the target must not even be loaded."""
    write_corpus(tmp_path / "corpus", 4)

    def no_target(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded for nothing")

    monkeypatch.setattr("outrider.tools.training.run.load_target", no_target)

    def run(*arguments: object) -> Done:
        paths = ("--data", tmp_path / "corpus", "--output", tmp_path / "drafter")
        return run_main(monkeypatch, capsys, ("train", "dflash", *paths, *arguments), "")

    return run


def assert_refused(done: Done, text: str) -> None:
    assert done.status == 2
    (line,) = done.err.strip().splitlines()
    assert line.startswith("error: ")
    assert text in line


def test_an_output_that_is_a_file_is_refused(train: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "drafter").write_text("here already")
    assert_refused(train("--steps", 1), "is a file; --output must be a directory")


@pytest.mark.parametrize("command", ["corpus", "held-out"])
def test_where_nothing_could_be_written_nothing_is_computed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_target(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded for nothing")

    monkeypatch.setattr("outrider.tools.training.target.load_target", no_target)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n')
    for output, text in (
        (prompts, "is a file; --output must be a directory"),
        (prompts / "below", "cannot be created"),
    ):
        arguments = ("train", command, "--prompts", prompts, "--output", output)
        assert_refused(run_main(monkeypatch, capsys, arguments, ""), text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--evaluation gone", "gone does not exist; make it first: outrider train held-out"),
        ("--data nowhere", "does not exist; make a corpus first: outrider train corpus"),
        ("--minutes 1", "either --minutes or --steps"),
        ("--optimiser sgd", "optimiser 'sgd' is not known; choose one of muon, adamw"),
        ("--weighting flat", "weighting 'flat' is not known"),
        ("--distil 2", "distil must be a fraction between 0 and 1"),
        ("--holdout -1", "holdout must be at least 0"),
        ("--long-share 0.2", "--long-share refines --long-data, which is missing; give both or neither"),
        ("--long-pack 1", "--long-pack refines --long-data, which is missing"),
        ("--smaller-share 0.3", "--smaller-share refines --smaller-block, which is missing"),
        ("--device tpu0", "device 'tpu0' is not known"),
        ("--device cuda:99", "device 'cuda:99' does not exist"),
        ("--dtype int8", "dtype 'int8' is not known"),
        ("--seed -1", "seed must be at least 0 and less than 9,223,372,036,854,775,808, got -1"),
        (f"--seed {1 << 63}", "seed must be at least 0 and less than 9,223,372,036,854,775,808"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: str, text: str, train: Callable[..., Done]) -> None:
    assert_refused(train("--steps", 1, *options.split()), text)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_a_run_needs_some_time(minutes: str, train: Callable[..., Done]) -> None:
    assert_refused(train("--minutes", minutes), "minutes must be more than 0")
    assert_refused(train(), "either --minutes or --steps")


def refusal(directory: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        train_for(settings_for(directory, **changes), tiny_target(), report=lambda line: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_corpus_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    streams = greedy_streams(4)
    write_shard(tmp_path / "corpus", Streams(tokens=streams.tokens + 200, roles=streams.roles))
    assert "the target has 256 tokens: the corpus was made with another model" in refusal(tmp_path)
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not readable JSON"),
        ("[" * 100_000, "is not readable JSON"),
        ('["one"]', "a category for each of 4"),
    ],
)
def test_broken_categories_are_refused(content: str, text: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    (tmp_path / "corpus" / "categories.json").write_text(content)
    assert text in refusal(tmp_path, evaluation=tmp_path / "corpus")


def test_what_does_not_fit_the_target_or_the_streams_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    assert "the target has layers 0 to 2" in refusal(tmp_path, taps=(1, 3))
    assert "is not a token of the target" in refusal(tmp_path, mask_token_id=256)
    assert "do not fit into streams of 48 tokens" in refusal(tmp_path, anchors=48)
    assert "cannot fill a batch" in refusal(tmp_path, pool_streams=2)


def without_roles(streams: Streams, first: int) -> Streams:
    """Nothing was sampled by the assistant from this stream on."""
    roles = streams.roles.copy()
    roles[first:] = False
    return Streams(tokens=streams.tokens, roles=roles)


def test_streams_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    """Answers in the streams that are held out help nobody, nor do answers of a single token."""
    write_shard(tmp_path / "corpus", without_roles(greedy_streams(8), 2))
    assert "corpus: nothing to learn from" in refusal(tmp_path, holdout=2)
    train_for(settings_for(tmp_path, steps=1, holdout=1), tiny_target(), report=lambda line: None)

    write_corpus(tmp_path / "other", 4)
    single = np.zeros((4, 101), dtype=np.bool_)
    single[:, [0, 1, 7, 100]] = True
    write_shard(tmp_path / "long", Streams(tokens=np.zeros((4, 101), dtype=np.int64), roles=single))
    said = refusal(tmp_path, data=(tmp_path / "other",), long_data=(tmp_path / "long",), output=tmp_path / "second")
    assert "long: nothing to learn from" in said


def test_damaged_corpora_are_refused(tmp_path: Path) -> None:
    def read() -> str:
        with pytest.raises(ConfigError) as caught:
            read_corpus(tmp_path, vocab_size=256)
        return str(caught.value)

    assert "is not a corpus" in read()
    (tmp_path / "toks_0.npy").write_bytes(b"not an array")
    assert "not a readable npy file" in read()
    np.save(tmp_path / "toks_0.npy", np.zeros((2, 8), dtype=np.uint16))
    assert "roles are missing" in read()
    np.save(tmp_path / "roles_0.npy", np.zeros((3, 1), dtype=np.uint8))
    assert "2 streams of 8 tokens need (2, 1)" in read()
    np.save(tmp_path / "roles_0.npy", np.zeros((2, 1), dtype=np.uint8))
    assert "nothing to learn from" in read()
    np.save(tmp_path / "toks_0.npy", np.zeros((2, 8)))
    assert "does not hold whole numbers" in read()


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]", json.dumps({"source": 3}), json.dumps({"sauce": "x"})])
def test_a_broken_note_on_the_corpus_is_refused(content: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    (tmp_path / "corpus" / "corpus.json").write_text(content)
    assert "corpus.json" in refusal(tmp_path)
