"""What HTTP costs is measured on equal engines and equal texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.running import RunningServer

from outrider.cli.bench_serve import serve_options
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.errors import ConfigError
from outrider.tools.bench.http_client import Client
from outrider.tools.bench.serve import ServeBenchConfig, measure


def test_both_sides_write_the_same_and_are_compared(tiny: RunningServer, tiny_model_path: Path) -> None:
    engine = EngineConfig(
        model=str(tiny_model_path),
        backend="reference",
        kv_cache_memory_bytes=8 << 20,
        speculative_config=SpeculativeConfig(method="ngram"),
    )
    config = ServeBenchConfig(engine=engine, prompt_tokens=24, tokens=12, rounds=3)
    report = measure(config, build_engine(engine), Client(tiny.url))
    assert (report["texts"], report["texts_that_differ"]) == (3, 0)
    assert report["http_tokens_per_s"] > 0
    assert report["ratio"] > 0
    assert 0 < report["ttft_outside_ms"] < report["http_ttft_ms"]
    assert 0 < report["ttft_queued_ms"] < report["http_ttft_ms"]


def test_the_server_is_started_with_the_same_engine() -> None:
    config = EngineConfig(
        model="m",
        max_num_seqs=3,
        backend="reference",
        enable_prefix_caching=False,
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    )
    options = serve_options(config)
    assert options[:5] == ["m", "--max-num-seqs", "3", "--backend", "reference"]
    assert "--no-enable-prefix-caching" in options
    assert '"num_speculative_tokens": 2' in options[-1]
    assert serve_options(EngineConfig(model="m")) == ["m", "--no-speculation"]


@pytest.mark.parametrize("settings", [{"tokens": 0}, {"text": "nonsense"}])
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServeBenchConfig(engine=EngineConfig(), **settings)  # type: ignore[arg-type]


def test_a_load_without_the_sanitizer_is_refused() -> None:
    from typer.testing import CliRunner

    from outrider.cli.app import app

    done = CliRunner().invoke(app, ["bench", "serve", "--load"])
    assert isinstance(done.exception, ConfigError)
    assert "--sanitizer" in str(done.exception)
