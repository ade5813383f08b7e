"""The KV benchmark measures what it says: every field is there and every count is right. Never the time."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import bench as cli
from outrider.errors import ConfigError
from outrider.kv.archetypes import ARCHETYPES
from outrider.speculative.registry import BUILT_IN
from outrider.tools.bench.kv import (
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

METHOD = "chain_from_taps"
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


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in numbers(each)]
    return [value]


def test_every_figure_is_there_and_none_is_better_than_the_best(report: KVBenchReport) -> None:
    data = json.loads(json.dumps(report.to_json()))
    times = {name: data[name] for name in data["best"] if name not in ("scaling", "scaling_ratio_max")}
    assert len(times) == 4
    best_times = {name: data["best"][name] for name in times}
    assert all(0 < best <= typical for best, typical in zip(numbers(best_times), numbers(times), strict=True))
    sizes = [(entry["running"], entry["cached_pages"]) for entry in data["scaling"]]
    assert sizes == [(4, 0), (16, 7), (16, 20)]
    assert data["scaling"][0]["us_per_request_step"] == data["us_per_request_step"]
    assert set(data["reference"]["ours_to_reference"]) == set(REFERENCE)


def test_every_request_is_served_to_its_last_token(report: KVBenchReport) -> None:
    for name, runs in report.served.items():
        assert [run.finished for run in runs] == [report.config.cases[name].requests] * 2
    # One prompt step for the first token, and three tokens a step: two accepted drafts and one more.
    for run in report.served["main"]:
        assert run.request_steps >= TINY.requests * 5
        assert 0 < run.pure_request_steps < run.request_steps
    for runs in report.served.values():
        assert len({(run.steps, run.request_steps, run.pure_request_steps) for run in runs}) == 1
    # Without drafts each step gives one token.
    assert all(run.request_steps == TINY.requests * TINY.generated_tokens for run in report.served["plain"])


def test_rounds_are_interleaved_and_announced() -> None:
    reported: list[str] = []
    measure(TINY_BENCH, reported.append)
    assert len(reported) == TINY_BENCH.measurements
    assert [entry.partition(":")[0] for entry in reported] == ["round 1"] * 5 + ["round 2"] * 5


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


@pytest.mark.parametrize("method", [*ARCHETYPES, *BUILT_IN])
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
        ({"method": "guessing"}, "unknown drafting method"),
    ],
)
def test_impossible_workload_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        layout_for(Workload(**({"method": METHOD} | changes)))


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
