"""A short load on a tiny model: what the script does for minutes on the real one."""

from __future__ import annotations

from pathlib import Path

from tests.server.conftest import TINY
from tests.server.running import RunningServer

from outrider.bench.load import ADMIN_KEY, LoadConfig, run_load


def test_nothing_is_left_behind_by_clients_that_come_err_and_leave(tiny_model_path: Path) -> None:
    server = RunningServer(tiny_model_path, *TINY, "--admin-key", ADMIN_KEY, "--max-num-seqs", "12").wait()
    try:
        report = run_load(server, LoadConfig(clients=8, minutes=0.15, kills=1, max_tokens=24))
    finally:
        assert server.stop() == 0
    assert report["problems"] == []
    assert report["kills"] == 1
    assert report["left_early"] > 0
    assert any(kind.startswith("malformed 4") for kind in report["statuses"])
    assert report["statuses"]["stream 200"] > 8
