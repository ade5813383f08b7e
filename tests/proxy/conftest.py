"""Workers that the tests share: each is started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.proxy.cluster import start_worker
from tests.server.running import RunningServer
from tests.server.tiny_model import save_tiny_model


class Pair(NamedTuple):
    prefill: RunningServer
    decode: RunningServer


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "key"
    path.write_text("a cluster key that only these tests know\n")
    return path


@pytest.fixture(scope="session")
def pair(tiny_model_path: Path, key_file: Path) -> Iterator[Pair]:
    """A prefill and a decode worker that serve."""
    started = Pair(*(start_worker(tiny_model_path, key_file, role) for role in ("kv_producer", "kv_consumer")))
    try:
        for worker in started:
            worker.wait()
        yield started
        for worker in started:
            assert "broken at step" not in worker.log, worker.log
            assert "Traceback" not in worker.log, worker.log
    finally:
        for worker in started:
            assert worker.stop() == 0, worker.log
