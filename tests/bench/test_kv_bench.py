"""The KV benchmark measures what it says: every field is there and every count is right. Never the time."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.api.cli import bench as cli
from outrider.bench.kv import (
    REFERENCE,
    KVBenchConfig,
    KVBenchReport,
    Tokens,
    Workload,
    build,
    fill_cache,
    layout_for,
    measure,
    serve,
)
from outrider.errors import ConfigError
from outrider.speculative.footprints import FOOTPRINTS

METHOD = "eagle"
TINY = Workload(
    method=METHOD,
    requests=12,
    running=4,
    prompt_tokens=40,
    shared_tokens=16,
    generated_tokens=13,
    page_tokens=8,
)
TINY_BENCH = KVBenchConfig(workload=TINY, scaling_cached_pages=(7, 20), lookup_tokens=96, repeats=2)


@pytest.fixture(scope="module")
def report() -> KVBenchReport:
    return measure(TINY_BENCH)


def positive_everywhere(value: Any) -> bool:
    if isinstance(value, dict):
        return all(positive_everywhere(entry) for key, entry in value.items() if key != "cached_pages")
    if isinstance(value, list):
        return all(map(positive_everywhere, value))
    return isinstance(value, int | float) and value > 0


def test_every_figure_is_there_and_positive(report: KVBenchReport) -> None:
    data = report.to_json()
    figures = {
        "us_per_request_step",
        "us_per_request_step_pure_decode",
        "us_per_request_step_without_speculation",
        "lookup_32k_ms",
        "scaling",
        "scaling_ratio_max",
    }
    plain = {"steps_per_second", "steps", "request_steps", "peak_rss_mb", "peak_rss_main_mb"}
    assert set(data) == figures | plain | {"best", "reference", "config"}
    assert set(data["best"]) == figures
    assert set(data["lookup_32k_ms"]) == {
        "hash_ms",
        "miss_ms",
        "hit_ms",
        "allocate_ms",
        "total_fresh_ms",
        "total_cached_ms",
    }
    assert positive_everywhere({name: data[name] for name in figures | plain | {"best"}})
    assert json.loads(json.dumps(data)) is not None


def test_scaling_starts_from_the_main_workload(report: KVBenchReport) -> None:
    data = report.to_json()
    sizes = [(entry["running"], entry["cached_pages"]) for entry in data["scaling"]]
    assert sizes == [(4, 0), (16, 7), (16, 20)]
    assert data["scaling"][0]["us_per_request_step"] == data["us_per_request_step"]
    assert data["scaling_ratio_max"] > 0


def test_best_is_never_worse_than_the_median(report: KVBenchReport) -> None:
    data = report.to_json()
    assert data["best"]["us_per_request_step"] <= data["us_per_request_step"]
    assert all(data["best"]["lookup_32k_ms"][name] <= data["lookup_32k_ms"][name] for name in ("hash_ms", "hit_ms"))


def test_reference_is_marked_as_measured_elsewhere(report: KVBenchReport) -> None:
    reference = report.to_json()["reference"]
    assert "elsewhere" in reference["source"]
    assert "not in this run" in reference["source"]
    assert reference["figures"] == dict(REFERENCE)
    assert set(reference["ours_to_reference"]) == set(REFERENCE)


def test_every_request_is_served_to_its_last_token(report: KVBenchReport) -> None:
    for name, runs in report.served.items():
        assert [run.finished for run in runs] == [report.config.cases[name].requests] * 2
    # One prompt step for the first token, and three tokens a step: two accepted drafts and one more.
    for run in report.served["main"]:
        assert run.request_steps >= TINY.requests * 5
        assert 0 < run.pure_request_steps < run.request_steps
    # Without drafts each step gives one token.
    assert all(run.request_steps == TINY.requests * TINY.generated_tokens for run in report.served["plain"])


def test_rounds_are_interleaved_and_announced() -> None:
    told: list[str] = []
    measure(TINY_BENCH, told.append)
    assert len(told) == TINY_BENCH.measurements
    assert [entry.partition(":")[0] for entry in told] == ["round 1"] * 5 + ["round 2"] * 5


def test_the_same_work_is_done_in_every_round(report: KVBenchReport) -> None:
    for runs in report.served.values():
        assert len({(run.steps, run.request_steps, run.pure_request_steps) for run in runs}) == 1


def test_cache_is_filled_with_pages_that_nobody_holds() -> None:
    workload = Workload(method=METHOD, running=4, requests=4, prompt_tokens=40, shared_tokens=0, cached_pages=13)
    scheduler = build(workload)
    fill_cache(scheduler, workload, Tokens(workload))
    scheduler.kv.check_integrity()
    assert [arena.num_cached for arena in scheduler.kv.pool.arenas] == [13, 13]
    assert [len(index) for index in scheduler.kv.pool.indexes] == [13, 13]


def test_drafter_owns_an_arena_of_its_own() -> None:
    layout = layout_for(TINY)
    assert len(layout.groups) == 2
    assert len(set(layout.arena_of)) == 2


@pytest.mark.parametrize("method", FOOTPRINTS)
def test_any_method_can_be_served(method: str) -> None:
    workload = Workload(
        method=method,
        requests=3,
        running=2,
        prompt_tokens=20,
        shared_tokens=9,
        generated_tokens=9,
        page_tokens=4,
    )
    assert serve(workload, Tokens(workload)).finished == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"requests": 0}, "requests"),
        ({"k": -1}, "k must"),
        ({"shared_tokens": 2000}, "shared_tokens"),
        ({"cached_pages": -1}, "cached_pages"),
    ],
)
def test_impossible_workload_is_refused(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Workload(method=METHOD, **changes)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown drafting method"):
        layout_for(Workload(method="guessing"))


def test_workload_that_never_decodes_has_no_pure_figure() -> None:
    workload = Workload(
        method=METHOD,
        requests=2,
        running=2,
        prompt_tokens=8,
        shared_tokens=0,
        generated_tokens=1,
        page_tokens=4,
    )
    with pytest.raises(ConfigError, match="pure decoding"):
        _ = serve(workload, Tokens(workload)).us_per_request_step_pure_decode


@pytest.fixture
def _tiny_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is, with sizes for a test."""

    def tiny_config(*, workload: Workload, repeats: int) -> KVBenchConfig:
        return KVBenchConfig(workload=TINY, scaling_cached_pages=(7,), lookup_tokens=96, repeats=repeats)

    monkeypatch.setattr(cli, "KVBenchConfig", tiny_config)


@pytest.mark.usefixtures("_tiny_command")
def test_json_is_one_object_and_nothing_else() -> None:
    result = CliRunner().invoke(cli.bench_app, ["kv", "--json", "--quick"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["config"]["repeats"] == 1
    assert result.stdout.count("\n") == 1


@pytest.mark.usefixtures("_tiny_command")
@pytest.mark.parametrize("options", [["--k", "1"], ["--method", "none"], ["--requests", "1"], ["--quick"]])
def test_another_workload_than_the_references_is_not_compared_with_it(options: list[str]) -> None:
    runner = CliRunner()
    data = json.loads(runner.invoke(cli.bench_app, ["kv", "--json", "--repeats", "1", *options]).stdout)
    assert data["reference"] is None
    shown = runner.invoke(cli.bench_app, ["kv", "--repeats", "1", *options]).stdout
    assert "median / reference" not in shown
    assert "No reference" in shown


@pytest.mark.usefixtures("_tiny_command")
def test_tables_say_where_the_reference_comes_from() -> None:
    result = CliRunner().invoke(cli.bench_app, ["kv", "--repeats", "2"])
    assert result.exit_code == 0, result.output
    assert "medians of 2 rounds" in result.stdout
    assert "not in this run" in " ".join(result.stdout.split())
    assert "Scaling" in result.stdout
