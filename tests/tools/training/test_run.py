"""Whole runs over a tiny corpus: they learn, go on where they stopped, and survive being killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine
from tests.tools.training.tiny import (
    END,
    LENGTH,
    PROMPT,
    assert_resumes_to_the_bit,
    greedy_streams,
    overfit_settings,
    settings_for,
    tiny_loaded,
    tiny_target,
    trainer_of,
    write_corpus,
)

from outrider.api.llm import LLM
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.sampling import SamplingParams
from outrider.tools.training import checkpoint, export
from outrider.tools.training.checkpoint import load_state, save_state
from outrider.tools.training.corpus import Streams, write_shard
from outrider.tools.training.pooling import StreamSource
from outrider.tools.training.run import train_for
from outrider.tools.training.settings import TrainSettings


def quiet(_line: str) -> None:
    pass


def weights(settings: TrainSettings) -> dict[str, torch.Tensor]:
    return load_file(settings.output / "model.safetensors")


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# ---- learning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_overfitting_raises_acceptance_in_simulation_and_in_the_engine(method: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    settings = overfit_settings(tmp_path, method)
    lines: list[str] = []
    before = train_for(
        overfit_settings(tmp_path, method, steps=1, output=tmp_path / "one"), tiny_target(), report=quiet
    )
    after = train_for(settings, tiny_target(), report=lines.append)
    assert before is not None
    assert after is not None
    simulated = after["categories"]["all"]["mean_acceptance_length"]
    assert before["categories"]["all"]["mean_acceptance_length"] < 1.2
    assert simulated > 3.0

    config = SpeculativeConfig(method=method, model=str(settings.output), num_speculative_tokens=settings.k)
    engine = tiny_engine(tiny_loaded(), speculative_config=config)
    streams = greedy_streams(4)
    prompts = streams.tokens[:, :PROMPT].tolist()
    texts = tokens_of(LLM.over(engine).generate(prompts, SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT)))
    for number, text in enumerate(texts):
        # The corpus is what the engine says, and drafts change nothing of it.
        said = streams.tokens[number][streams.roles[number]].tolist()
        assert text[: len(said)] == said
    assert engine.speculation.mean_acceptance_length == pytest.approx(simulated, abs=0.4)


def test_progress_says_speed_loss_acceptance_and_time_left(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    lines: list[str] = []
    settings = settings_for(tmp_path, steps=4, log_every=2, evaluate_every_s=0.0, evaluation=tmp_path / "corpus")
    train_for(settings, tiny_target(), report=lines.append)
    progress = [line for line in lines if re.match(r"step \d+ · loss", line)]
    assert len(progress) == 2
    pattern = r"loss \d+\.\d+ .*simulated acceptance \d\.\d\d, held out \d\.\d\d .* tokens/s · \d+:\d\d left$"
    assert re.search(pattern, progress[-1]), progress[-1]
    assert any("held-out acceptance length all" in line for line in lines)


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_answers_to_measure_with_may_have_a_length_of_their_own(method: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    answers = greedy_streams(4, seed=1)
    roles = answers.roles.copy()
    roles[:, LENGTH - 8 :] = False
    for name, change in (("as long", 0), ("longer", 16), ("shorter", -8)):
        tokens = np.pad(answers.tokens, ((0, 0), (0, max(0, change))))[:, : LENGTH + change]
        said = np.pad(roles, ((0, 0), (0, max(0, change))))[:, : LENGTH + change]
        write_shard(tmp_path / name, Streams(tokens=tokens, roles=said))

    def measured(name: str) -> Any:
        settings = settings_for(tmp_path, method, evaluation=tmp_path / name, steps=2)
        return train_for(settings, tiny_target(), report=quiet, fresh=True)

    figures = measured("as long")
    assert figures is not None
    assert figures["categories"]["all"]["tokens"] > 0
    assert measured("longer") == figures
    assert measured("shorter") == figures


def test_a_label_outside_the_draft_vocabulary_counts_as_missed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    settings = overfit_settings(tmp_path, "eagle3", draft_vocab_size=2, steps=2)
    trainer = trainer_of(settings)
    values = trainer.train_step()
    assert float(values["length"]) < 2.0
    result = train_for(settings, tiny_target(), report=quiet)
    assert result is not None
    assert result["categories"]["all"]["mean_acceptance_length"] < 2.0


# ---- going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("dflash", {"optimiser": "muon", "distil": 0.5}),
        ("eagle3", {"optimiser": "adamw", "draft_vocab_size": 40, "weighting": "dpace"}),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    # Stopped in the middle of a pool; what follows needs the next one too.
    assert_resumes_to_the_bit(settings_for(tmp_path, method, steps=7, **changes), stopped_after=3)


def stopped_after(step: int) -> Callable[[str], None]:
    def report(line: str) -> None:
        if line.startswith(f"step {step} "):
            os.kill(os.getpid(), signal.SIGTERM)

    return report


def test_a_terminated_run_exports_and_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    alone = settings_for(tmp_path, steps=6, log_every=1, output=tmp_path / "alone")
    train_for(alone, tiny_target(), report=quiet)
    settings = settings_for(tmp_path, steps=6, log_every=1)
    train_for(settings, tiny_target(), report=stopped_after(2))
    state = load_state(settings.output)
    assert state is not None
    assert state["step"] == 2
    assert weights(settings)
    train_for(settings, tiny_target(), report=quiet)
    assert_same(weights(settings), weights(alone))


def with_all_tokens(directory: Path) -> None:
    """Add streams whose counts are far from those that were there."""
    tokens = np.tile(np.arange(200, END, dtype=np.int64), (40, 1))[:, :LENGTH]
    write_shard(directory, Streams(tokens=tokens, roles=np.ones_like(tokens, dtype=np.bool_)))


@pytest.mark.parametrize(("method", "changes"), [("eagle3", {"draft_vocab_size": 20}), ("dflash", {})])
def test_tokens_chosen_from_the_data_stay_when_the_corpus_grows(
    method: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus", 8)
    settings = settings_for(tmp_path, method, steps=6, log_every=1, holdout=2, **changes)
    train_for(settings, tiny_target(), report=stopped_after(2))
    before, config = weights(settings), (settings.output / "config.json").read_text()
    with_all_tokens(tmp_path / "corpus")
    train_for(settings, tiny_target(), report=quiet)
    after = weights(settings)
    assert (settings.output / "config.json").read_text() == config
    for name in ("d2t", "t2d", "lm_head.weight"):
        assert (name in after) == (name in before)
        if name in after:
            assert torch.equal(after[name], before[name])
    # A run that begins with the larger corpus chooses otherwise.
    other = settings_for(tmp_path, method, steps=1, output=tmp_path / "other", **changes)
    train_for(other, tiny_target(), report=quiet)
    if method == "eagle3":
        assert not torch.equal(weights(other)["d2t"], after["d2t"])
    # What was trained on is not held out later.
    state = load_state(settings.output)
    assert state is not None
    assert state["lanes"][0]["source"]["held_out"] == 2


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    settings = settings_for(tmp_path, steps=1)
    train_for(settings, tiny_target(), report=quiet)
    for changes in ({"k": 2}, {"layers": 1}, {"mask_token_id": 7}, {"method": "eagle3", "layers": 1}):
        with pytest.raises(ConfigError, match=r"holds another run .*--fresh"):
            train_for(settings_for(tmp_path, **({"steps": 2} | changes)), tiny_target(), report=quiet)  # type: ignore[arg-type]
    train_for(settings_for(tmp_path, steps=1, k=2), tiny_target(), report=quiet, fresh=True)
    (tmp_path / "corpus" / "toks_0.npy").unlink()
    write_shard(tmp_path / "corpus", greedy_streams(4))
    with pytest.raises(ConfigError, match="has 4 streams, but had 8 before: give the run the same data"):
        train_for(settings_for(tmp_path, steps=2, k=2), tiny_target(), report=quiet)


def test_streams_of_another_length_are_not_continued_with(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    train_for(settings_for(tmp_path, steps=1), tiny_target(), report=quiet)
    streams = greedy_streams(8)
    shorter = Streams(tokens=streams.tokens[:, :40], roles=streams.roles[:, :40])
    write_shard(tmp_path / "shorter", shorter)
    with pytest.raises(ConfigError, match="has streams of 40 tokens, but the run to continue had streams of 48"):
        train_for(settings_for(tmp_path, steps=2, data=(tmp_path / "shorter",)), tiny_target(), report=quiet)


@pytest.mark.parametrize("resumed", [False, True])
def test_several_corpora_may_grow_and_every_number_means_the_same_stream(resumed: bool, tmp_path: Path) -> None:
    """What is held out lies in both corpora, and the first of them grows."""
    paths = (tmp_path / "one", tmp_path / "two")
    write_shard(paths[0], greedy_streams(2))
    write_shard(paths[1], greedy_streams(10, seed=1))

    def source() -> StreamSource:
        return StreamSource(paths, vocab_size=END + 1, holdout=3, seed=0, watch=True)

    first = source()
    seen = first.next(4).tolist()
    before, held_out = first.streams.tokens.copy(), first.held_out.tokens.copy()
    state = first.state()
    write_shard(paths[0], greedy_streams(5, seed=2))
    write_shard(paths[1], greedy_streams(1, seed=3))
    if resumed:
        first = source()
        first.load_state(state)
    seen += first.next(11).tolist()
    # Each once, the new ones too, before any comes again.
    assert sorted(seen) == list(range(3, 18))
    assert np.array_equal(first.streams.tokens[:12], before)
    assert np.array_equal(first.held_out.tokens, held_out)
    # And once more from what is saved now.
    again = source()
    again.load_state(first.state())
    assert np.array_equal(again.streams.tokens, first.streams.tokens)
    assert again.next(15).tolist() == first.next(15).tolist()


def test_a_corpus_that_shrinks_or_is_left_out_is_refused(tmp_path: Path) -> None:
    paths = (tmp_path / "one", tmp_path / "two")
    for path in paths:
        write_shard(path, greedy_streams(4))
        write_shard(path, greedy_streams(4, seed=1))
    source = StreamSource(paths, vocab_size=END + 1, holdout=0, seed=0, watch=True)
    one = StreamSource(paths[:1], vocab_size=END + 1, holdout=0, seed=0, watch=True)
    with pytest.raises(ConfigError, match="used 2 corpora, 1 are given: give the run the same data"):
        one.load_state(source.state())
    (paths[1] / "toks_1.npy").unlink()
    with pytest.raises(ConfigError, match="two has 4 streams, but had 8 before"):
        source.next(4)


def test_damaged_data_that_arrives_meanwhile_loses_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    settings = settings_for(tmp_path, steps=12, log_every=1, watch=True)
    added = tmp_path / "corpus" / "toks_1.npy"

    def spoil(line: str) -> None:
        if line.startswith("step 2 "):
            added.write_bytes(b"nonsense")

    with pytest.raises(ConfigError, match=r"toks_1.npy .*; the run is saved as of step 4: repair the data"):
        train_for(settings, tiny_target(), report=spoil)
    state = load_state(settings.output)
    assert state is not None
    assert state["step"] == 4
    added.unlink()
    lines: list[str] = []
    train_for(settings, tiny_target(), report=lines.append)
    assert "resuming from step 4" in lines
    assert lines[-2].startswith("done: 12 steps")


# ---- being killed --------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def test_a_run_killed_while_saving_keeps_its_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, {"step": 1})

    def half(_state: Any, file: Any) -> None:
        file.write(b"PK half of a file")
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.torch, "save", half)
        with pytest.raises(Killed):
            save_state(tmp_path, {"step": 2})
    state = load_state(tmp_path)
    assert state is not None
    assert state["step"] == 1
    save_state(tmp_path, {"step": 3})
    state = load_state(tmp_path)
    assert state is not None
    assert state["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.STATE_FILE]


def test_a_run_killed_while_exporting_keeps_its_old_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export.write_tensors(tmp_path, {"a": torch.ones(3)}, shard_mib=None)

    def half(_tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise Killed

    monkeypatch.setattr(export, "save_file", half)
    with pytest.raises(Killed):
        export.write_tensors(tmp_path, {"a": torch.zeros(3)}, shard_mib=None)
    assert load_file(tmp_path / export.WEIGHTS)["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("content", [b"", b"not a state", b"PK\x03\x04 cut off"])
def test_a_damaged_state_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / checkpoint.STATE_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read .*--fresh") as caught:
        load_state(tmp_path)
    assert "\n" not in str(caught.value)
