"""Servers that the tests share: each is started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.running import RunningServer
from tests.server.tiny_model import save_tiny_model

API_KEY, OTHER_KEY, ADMIN_KEY = "key-of-one-tenant", "key-of-another-tenant", "key-of-the-admin"
TINY = ("--backend", "reference", "--num-threads", "1", "--kv-cache-memory-bytes", "8M", "--sanitizer", "raise")
# How much is drafted must not depend on the time where answers are compared field by field.
FIXED_DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny(tiny_model_path: Path) -> Iterator[RunningServer]:
    """Without keys, with speculation from the text itself, and with the sanitizer on."""
    server = RunningServer(tiny_model_path, *TINY, *FIXED_DRAFTS, "--served-model-name", "tiny", "--render-limit", "1")
    try:
        yield server.wait()
        assert "broken at step" not in server.log, server.log
        assert "Traceback" not in server.log, server.log
    finally:
        assert server.stop() == 0, server.log


@pytest.fixture(scope="session")
def choosing(tiny_model_path: Path) -> Iterator[RunningServer]:
    """Chooses at each step how much it speculates, from the text itself."""
    server = RunningServer(tiny_model_path, *TINY, "--speculative-config", '{"method": "ngram"}')
    try:
        yield server.wait()
        assert "Traceback" not in server.log, server.log
    finally:
        assert server.stop() == 0, server.log
