"""Outrider beside other engines: what the figures mean, and a peer that does not work."""

import sys
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.models.resolve import DEFAULT_MODEL
from outrider.tools.bench import peers


def test_decoding_counts_only_what_comes_after_the_first_token() -> None:
    decode = peers.Case(name="batch 2", prompts=[[1, 2, 3]] * 2, max_tokens=11)
    assert decode.rate(first_s=1.0, all_s=3.0) == pytest.approx(10.0)
    assert decode.rate(first_s=3.0, all_s=2.9) is None
    prompt = peers.Case(name="prompt of 3", prompts=[[1, 2, 3]], max_tokens=1)
    assert prompt.rate(first_s=0.5, all_s=0.5) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--speculative-config", "ngram"], "JSON object"), (["--model", str(Path(__file__).parent)], "GGUF")],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        peers.run(["--peers-python", sys.executable, *options])


@pytest.mark.slow
def test_a_peer_that_does_not_start_is_reported_and_left_out() -> None:
    settings = {"model": DEFAULT_MODEL, "threads": 1, "batch": 1, "speculative_config": None}
    here = Path(sys.executable)
    contestants = [
        peers.Contestant(name="openvino", engine="openvino", python=here, settings=settings),
        peers.Contestant(name=peers.PLAIN, engine="outrider", python=here, settings=settings),
    ]
    told: list[str] = []
    plan = peers.Plan(rounds=1, tokens=3, batches=(1,), prompt_tokens=8)
    found = peers.measure(plan, contestants, told.append)
    assert any("openvino failed" in line and "ModuleNotFoundError" in line for line in told)
    assert list(found) == [peers.PLAIN]
    figures = found[peers.PLAIN]
    assert {name: len(times) for name, times in figures.times_s.items()} == {"batch 1": 1, "prompt of 8": 1}
    assert [len(text) for text in figures.texts["batch 1"]] == [3]
    assert "2 of 2" in peers.table(found)
