"""The transfer benchmark, in its smallest form: real links, a real prefill worker, and figures that add up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import bench as cli
from outrider.cli.bench_transfer import print_report
from outrider.config import EngineConfig
from outrider.errors import ConfigError, TransferError
from outrider.tools.bench import transfer
from outrider.tools.bench.transfer import TransferBenchConfig
from outrider.tools.bench.transfer_first_token import PHASES, HandedOver
from outrider.tools.bench.transfer_links import Case, PagePair, measure_links
from outrider.tools.bench.transfer_pages import PagedMemory, all_spans, equal, prompt_runs, scaled
from outrider.transfer.links import nixl_agent
from outrider.transfer.links.memory import ArenaMemory, GroupMemory, MemoryMap

SHAPE = MemoryMap(
    arenas=[ArenaMemory(base=0, page_bytes=1600, num_pages=2), ArenaMemory(base=0, page_bytes=4096, num_pages=2)],
    groups=[
        GroupMemory(arena=1, planes=4, page_tokens=16, plane_slot_bytes=64),
        # 64 bytes of each page hold no slot.
        GroupMemory(arena=0, planes=2, page_tokens=48, plane_slot_bytes=16),
    ],
)
WAYS = ["copy", "local", "bare, cma", "nixl, cma", "bare, tcp", "nixl, tcp"]
SMALL = EngineConfig(max_model_len=128, kv_cache_memory_bytes=64 << 20, num_threads=1)


def run(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.bench_app, ["transfer", "--json", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize("pages", [PagePair(16, 16), PagePair(32, 16), PagePair(8, 32)], ids=str)
def test_the_pages_of_the_benchmark_hold_a_prompt_whose_bytes_can_be_compared(pages: PagePair) -> None:
    source, destination = (
        PagedMemory(scaled(SHAPE, page_tokens=size, base_tokens=16), num_tokens=50, seed=seed)
        for seed, size in enumerate(pages)
    )
    source.fill()
    assert 0 not in [*source.tables[0], *source.tables[1]]
    copied = all_spans(
        source.map, destination.map, prompt_runs(source.map, source.tables, destination.map, destination.tables, 50)
    )
    assert copied.total_bytes == 50 * (4 * 64 + 2 * 16)
    assert not equal(copied)
    assert equal(
        all_spans(source.map, source.map, prompt_runs(source.map, source.tables, source.map, source.tables, 50))
    )


def test_every_link_is_measured_beside_a_copy_and_beside_bare_calls() -> None:
    pytest.importorskip("nixl_cu12")
    pairs = [PagePair(16, 16), PagePair(16, 32)]
    told: list[str] = []
    reports = measure_links(
        SHAPE, 16, page_sizes=pairs, num_tokens=70, rounds=2, transports=("cma", "tcp"), progress=told.append
    )
    assert [(each["source_page_tokens"], each["destination_page_tokens"]) for each in reports] == pairs
    assert len(told) == 2
    for report in reports:
        missing = [way for way in WAYS if way not in report["ways"]]
        # Where this process may not read another one's memory, the report says so.
        assert not missing or (missing == ["bare, cma", "nixl, cma"] and "cma" in report["notes"][0])
        assert report["bytes"] == 70 * (4 * 64 + 2 * 16)
        for way, entry in report["ways"].items():
            assert entry["best_gb_per_s"] >= entry["gb_per_s"] > 0
            assert entry["ratio_to_copy"] > 0
            assert (entry["ratio_to_bare"] is not None) == way.startswith("nixl")
    assert reports[0]["spans"] < reports[1]["spans"]


def test_a_link_that_moves_other_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SHAPE, 16, PagePair(16, 16), 40, ())
    try:
        case.warm_up()
        monkeypatch.setattr("outrider.tools.bench.transfer_links.OverLink.move", lambda way: 0.1)
        with pytest.raises(TransferError, match="local has moved other bytes"):
            case.warm_up()
    finally:
        case.close()


def test_without_nixl_the_link_within_a_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MODULES", ("nixl_that_is_not_there",))
    nixl_agent.load_nixl.cache_clear()
    try:
        report = run("--moved-tokens", "40", "--rounds", "1", "--page-tokens", "16", "--no-speculation")
    finally:
        nixl_agent.load_nixl.cache_clear()
    assert "pip install 'outrider[pd]'" in report["missing"]
    assert report["first_tokens"] is None
    assert [list(case["ways"]) for case in report["links"]] == [["copy", "local"]]


def test_the_overhead_leaves_out_what_the_bytes_cost() -> None:
    phases = dict(prefill=1.0, ticket=0.001, fetch=0.002, queued=0.0, read=0.5, confirmed=0.003, woken=0.0, step=0.1)
    assert tuple(phases) == PHASES
    run = HandedOver(first_s=1.003, second_s=1.606, tokens=[1], num_bytes=1, phases_s=phases, bare_s=0.4)
    assert run.overhead_s == pytest.approx(0.106)
    # Bare calls may be slower: that is no merit of the rest of the hand-off.
    slow = HandedOver(first_s=1.003, second_s=1.606, tokens=[1], num_bytes=1, phases_s=phases, bare_s=0.6)
    assert slow.overhead_s == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "everything"], "links or first-tokens"),
        (["--transport", "smoke"], "auto, cma, tcp"),
        (["--device", "cuda"], "--device cpu"),
        (["--no-speculation", "--prompt-tokens", "9000", "--only", "first-tokens"], "--prompt-tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    if "9000" in options:
        pytest.importorskip("nixl_cu12")
    result = CliRunner().invoke(cli.bench_app, ["transfer", *options])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.slow
def test_two_processes_answer_as_one_worker_does(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nixl_cu12")
    config = TransferBenchConfig(
        engine=SMALL, page_tokens=(16,), moved_tokens=40, prompt_tokens=(40, 20), rounds=2, transport="tcp"
    )
    report = transfer.measure(config)
    print_report(report)
    printed = capsys.readouterr().out
    for words in ("over tcp", "nixl, tcp", "P confirms", "beyond moving the bytes", "4 of 4 texts"):
        assert words in printed
    found = report["first_tokens"]
    assert found["transport"] == "tcp"
    assert found["first_contact_ms"] > 0
    assert [row["prompt_tokens"] for row in found["prompts"]] == [20, 40]
    for row in found["prompts"]:
        assert (row["texts"], row["texts_that_differ"]) == (2, 0)
        assert 0 < row["alone_first_token_ms"] < row["alone_second_token_ms"]
        assert 0 < row["first_token_ms"] < row["second_token_ms"]
        assert set(row["phases_ms"]) == set(PHASES)
        assert 0 < row["moved_share"] < 1
        assert row["bare_read_ms"] > 0
    assert found["prompts"][1]["bytes"] == 2 * found["prompts"][0]["bytes"]
