"""`outrider bench acceptance` takes its drafter from options or JSON, and prints tables or one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli import Outrider, chat_model

from outrider.cli.drafter_options import speculation_of
from outrider.config import SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.errors import ConfigError
from outrider.speculative.registry import BUILT_IN
from outrider.tools.bench import acceptance

SIZES = ("--max-tokens", 6, "--max-model-len", 256, "--kv-cache-memory-bytes", "8M", "--backend", "reference")


@pytest.fixture
def bench(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outrider:
    """Over a tiny model and three chats."""
    monkeypatch.setattr(
        acceptance, "build_engine", lambda config, **given: build_engine(config, **(given | {"model": chat_model()}))
    )
    file = tmp_path / "chats.jsonl"
    lines = ({"category": "a", "turns": ["One?", "Two?"]}, {"category": "b", "prompt": "Three?"}, {"prompt": "Four?"})
    file.write_text("\n".join(map(json.dumps, lines)))
    return lambda *arguments, stdin="": outrider("bench", "acceptance", "--prompts", file, *SIZES, *arguments)


def test_tables_put_greedy_and_sampled_side_by_side(bench: Outrider) -> None:
    run = bench("--method", "ngram", "--k", 3)
    assert run.status == 0, run.err
    rows = {line.split()[0]: line.split()[1:] for line in run.out.splitlines() if line.strip()}
    # Chats, turns, then length, tokens per step and rate, each greedy and sampled.
    assert [len(rows[name]) for name in ("a", "b", "all")] == [8, 8, 8]
    assert [rows[name][:2] for name in ("a", "b", "all")] == [["1", "2"], ["1", "1"], ["3", "4"]]
    assert len(rows["greedy"]) == len(rows["sampled"]) == 3
    assert "3 drafts per step by ngram" in run.out
    assert "temperature 0.7" in run.out
    assert "\x1b" not in run.out


def test_one_pass_has_one_column(bench: Outrider) -> None:
    run = bench("--method", "ngram", "--no-sampled")
    assert run.status == 0
    assert "sampled" not in run.out


def test_json_is_one_object_with_the_settings(bench: Outrider) -> None:
    run = bench("--method", "ngram", "--limit", 1, "--temperature", 1.5, "--json")
    report: dict[str, Any] = json.loads(run.out)
    assert set(report) == {"config", "model", "drafter", "greedy", "sampled"}
    config = report["config"]
    assert (config["k"], config["limit"], config["temperature"], config["max_tokens"]) == (4, 1, 1.5, 6)
    assert report["greedy"]["all"]["prompts"] == 3


def test_chats_that_do_not_fit_are_said_aloud(bench: Outrider) -> None:
    run = bench("--method", "ngram", "--max-model-len", 36)
    assert run.status == 0, run.err
    assert "1 chat ended early" in run.err
    assert "--max-tokens" in run.err


def test_a_broken_file_is_refused_before_a_model_is_loaded(outrider: Outrider, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "a"}\nnonsense')
    run = outrider("bench", "acceptance", "--prompts", file, "--method", "ngram", "--model", "nowhere")
    assert run.status == 2
    assert f"{file}, line 2 is not valid JSON" in run.err
    assert '"turns"' in run.err


def test_the_drafter_comes_from_options_and_json_together() -> None:
    assert speculation_of(None, method="dflash", drafter="here", k=None) == SpeculativeConfig(
        method="dflash", model="here", num_speculative_tokens=7, draft_vocab_size=0
    )
    assert speculation_of({"prompt_lookup_max": 6}, method="ngram", drafter=None, k=2) == SpeculativeConfig(
        method="ngram", prompt_lookup_max=6, num_speculative_tokens=2, draft_vocab_size=0
    )
    given = {"method": "eagle3", "model": "here", "num_speculative_tokens": 3, "draft_vocab_size": 9}
    assert speculation_of(given, method="eagle3", drafter="here", k=3) == SpeculativeConfig(**given)
    assert [
        speculation_of(None, method=name, drafter=None, k=None).num_speculative_tokens
        for name in ("eagle3", "eagle", "mtp")
    ] == [5, 5, 4]
    with pytest.raises(ConfigError, match="--k says 2"):
        speculation_of(given, method=None, drafter=None, k=2)


@pytest.mark.parametrize("given", [{}, {"num_speculative_tokens": None}, {"draft_confidence": 0.3}, {"lookup": False}])
def test_what_a_drafter_can_do_is_measured_with_a_fixed_number_of_drafts(given: dict[str, Any]) -> None:
    """What an engine chooses depends on how long steps take, so no measurement could be repeated."""
    for name in BUILT_IN:
        assert not speculation_of(given, method=name, drafter=None, k=None).chooses


def test_a_measurement_of_a_drafter_looks_nothing_up() -> None:
    with pytest.raises(ConfigError, match="leave lookup out"):
        speculation_of({"lookup": True}, method="dflash", drafter=None, k=None)


def test_the_word_copying_stands_for_the_requests_of_the_package(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        acceptance, "build_engine", lambda config, **given: build_engine(config, **(given | {"model": chat_model()}))
    )
    run = outrider("bench", "acceptance", "--prompts", "copying", *SIZES, "--limit", 1, "--method", "ngram", "--json")
    assert run.status == 0, run.err
    assert {"code edit", "retrieval", "translation"} < set(json.loads(run.out)["greedy"]["categories"])
