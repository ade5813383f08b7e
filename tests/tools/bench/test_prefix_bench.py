"""Conversations find the same with every drafter as with none, and the benchmark would say if they did not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import bench as cli
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.tools.bench.prefix import OFF, PrefixBenchConfig, Row, model_rows, random_rows, report_of
from outrider.tools.bench.random_models import RANDOM_DRAFTERS, random_model

SMALL = PrefixBenchConfig(conversations=3, turns=3)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(random_rows(SMALL, lambda what: None))


def test_every_drafter_leaves_every_hit_and_every_answer_as_it_is(rows: list[Row]) -> None:
    layouts = {(row.model, row.retention) for row in rows}
    assert layouts == {("random, plain", "dense"), ("random, hybrid", "dense"), ("random, hybrid", "tail")}
    assert {row.drafter for row in rows} == {OFF, *RANDOM_DRAFTERS}
    assert len(rows) == 3 * (1 + len(RANDOM_DRAFTERS))
    for row in rows:
        hits = [turn.hit_tokens for turn in row.turns]
        assert hits == [turn.hit_tokens for turn in row.against], (row.model, row.retention, row.drafter)
        assert [turn.answer for turn in row.turns] == [turn.answer for turn in row.against]
        assert row.different_hits == row.different_answers == 0
        # All but the very first turn find something, later turns nearly all that was said before them.
        assert hits[0] == 0
        assert all(hits[1:3])
        assert row.acceptance_length == 1 if row.drafter == OFF else row.acceptance_length > 1


def test_a_hit_that_differs_is_counted_and_is_exit_status_1(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    off = rows[0]
    wrong = replace(off, drafter="a drafter", turns=(*off.turns[:-1], replace(off.turns[-1], hit_tokens=0)))
    report = report_of(SMALL, [off, wrong])
    assert not report["identical_hits"]
    assert report["identical_answers"]
    assert [row["turns_with_other_hits"] for row in report["rows"]] == [0, 1]
    monkeypatch.setattr("outrider.tools.bench.prefix.random_rows", lambda config, told: iter([off, wrong]))
    result = CliRunner().invoke(cli.bench_app, ["prefix", "--no-model"])
    assert result.exit_code == 1
    assert "DIFFERENT HITS" in result.stdout


def test_json_has_every_figure(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.tools.bench.prefix.random_rows", lambda config, told: iter(rows))
    result = CliRunner().invoke(cli.bench_app, ["prefix", "--no-model", "--json", "--conversations", "3"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["identical_hits"]
    for row in report["rows"]:
        assert row["prompt_tokens"] == row["hit_tokens"] + row["recomputed_tokens"]
        assert row["turns"] == len(row["hits"]) == 9
        assert row["time_to_first_token_ms"] > 0


def test_a_real_model_is_served_with_each_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("small", (16, None), max_position=512)
    monkeypatch.setattr("outrider.tools.bench.prefix.load_model", lambda name, **settings: model)
    config = EngineConfig(device="cpu", max_model_len=400, kv_cache_memory_bytes=16 << 20, kv_retention="tail")
    found = list(model_rows(SMALL, config, [SpeculativeConfig(method="ngram")], lambda what: None))
    assert [(row.drafter, row.retention) for row in found] == [(OFF, "tail"), ("ngram", "tail")]
    assert found[1].different_hits == 0
    with pytest.raises(ConfigError, match="lower --turns"):
        list(model_rows(replace(SMALL, turns=50), config, [], lambda what: None))


def test_nothing_to_measure_is_refused() -> None:
    result = CliRunner().invoke(cli.bench_app, ["prefix", "--no-model", "--no-random"])
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match="conversations"):
        PrefixBenchConfig(conversations=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--no-model", "--speculative-config", '{"method": "ngram"}'], "--no-model skips"),
        (["--speculative-config", '{"method": "of-no-package"}'], "unknown drafting method 'of-no-package'"),
        (["--speculative-config", '{"method": "ngram", "model": "x"}'], "does not take"),
    ],
)
def test_a_drafter_that_would_not_be_measured_is_refused_before_anything_runs(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tools.bench.prefix.random_rows", lambda config, told: pytest.fail("it runs"))
    result = CliRunner().invoke(cli.bench_app, ["prefix", *options])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
