"""`outrider doctor --memory`: every group and arena with its share, for the model and drafter that are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli import Outrider
from tests.models.fakes import save, tiny_model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with a window, two without."""
    return save(tiny_model("ministral"), tmp_path_factory.mktemp("hybrid"))


def memory(outrider: Outrider, *arguments: Any) -> dict[str, Any]:
    run = outrider("doctor", *arguments, "--memory", "--device", "cpu", "--kv-cache-memory-bytes", "4M", "--json")
    assert run.status == 0, run.err
    return dict(json.loads(run.out))


def test_groups_of_a_model_with_windows_share_an_arena(outrider: Outrider, hybrid: Path) -> None:
    report = memory(outrider, hybrid)
    groups = {group["name"]: group for group in report["groups"]}
    full, window = groups["target.full"], groups["target.window16"]
    assert (full["layers"], full["kind"], full["window"], full["page_tokens"]) == (2, "full", None, 48)
    assert (window["layers"], window["kind"], window["window"], window["page_tokens"]) == (3, "sliding", 16, 32)
    assert full["page_bytes"] == window["page_bytes"] == 48 * full["bytes_per_token"] == 32 * window["bytes_per_token"]
    assert full["arena"] == window["arena"] == 0
    (arena,) = report["arenas"]
    assert arena["groups"] == ["target.full", "target.window16"]
    assert report["total_bytes"] == arena["bytes"] == arena["pages"] * arena["page_bytes"] <= 4 << 20
    # 128 positions: three pages; a window and one row, and a page at the ragged front.
    assert (full["pages_per_request"], window["pages_per_request"]) == (3, 2)
    assert report["requests_of_max_model_len"] == (arena["pages"] - 1) // 5
    assert report["max_model_len"] == 128
    assert report["alignment_tokens"] == 96


def test_a_drafters_groups_are_listed_with_their_own_arena(outrider: Outrider, hybrid: Path) -> None:
    report = memory(outrider, hybrid, "--method", "draft_model", "--drafter", hybrid)
    owners = [(group["owner"], group["name"]) for group in report["groups"]]
    assert owners[2:] == [("drafter", "draft.full"), ("drafter", "draft.window16")]
    assert report["num_speculative_tokens"] > 0
    assert all(group["page_tokens"] == 16 for group in report["groups"][2:])
    assert sum(arena["bytes"] for arena in report["arenas"]) == report["total_bytes"]
    assert report["requests_of_max_model_len"] == min(arena["requests_of_max_model_len"] for arena in report["arenas"])


def test_the_default_drafter_takes_memory(outrider: Outrider) -> None:
    arguments = ("--kv-cache-memory-bytes", "64M", "--max-model-len", 512, "--device", "cpu")
    served, plain = (
        json.loads(outrider("doctor", "--memory", "--json", *arguments, *more).out)
        for more in ((), ("--no-speculation",))
    )
    assert (served["drafter"], plain["drafter"]) == ("dflash", None)
    assert served["tokens"] < plain["tokens"]
    said = outrider("doctor", "--memory", *arguments).out
    assert "dflash is the default drafter of `outrider serve`" in said
    assert "a cache hit may end at any token" in " ".join(said.split())
    assert "no drafter: " in outrider("doctor", "--memory", "--no-speculation", *arguments).out


def test_the_policy_changes_what_is_cached_and_held(outrider: Outrider, hybrid: Path) -> None:
    dense, tail = (memory(outrider, hybrid, "--kv-retention", policy) for policy in ("dense", "tail"))
    shares = [{group["name"]: group["cached_share"] for group in report["groups"]} for report in (dense, tail)]
    # [b - 16 + 1 - 2, b) of every 96th b lies in one page of three.
    assert shares == [{"target.full": 1.0, "target.window16": 1 / 3}, {"target.full": 1.0, "target.window16": 0.0}]
    assert tail["groups"][1]["pages_per_request"] > dense["groups"][1]["pages_per_request"]
    assert (dense["kv_retention"], tail["kv_retention"]) == ("dense", "tail")
    assert memory(outrider, hybrid, "--kv-retention", "40")["kv_retention"] == "every 40 tokens, and ends"


def test_tables_fit_a_terminal_and_say_where_a_cache_hit_may_end(outrider: Outrider, hybrid: Path) -> None:
    run = outrider("doctor", hybrid, "--memory", "--device", "cpu", "--kv-cache-memory-bytes", "4M")
    assert run.status == 0, run.err
    for part in ("target.window16", "the last 16", "pages per", "serves", "can decode at once"):
        assert part in run.out
    assert "…" not in run.out
    assert "at multiples of 96 tokens, and where a cached prompt ended" in " ".join(run.out.split())
