"""A mistake on the command line is one line on standard error and status 2, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.cli import Outrider

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
ACCEPTANCE = ("bench", "acceptance", "--prompts", "chats.jsonl")
DRAFTERS = (*ACCEPTANCE, "--method", "ngram")
MISTAKES: dict[tuple[str, ...], str] = {
    ("generate", "x", "--dtype", "int3"): "dtype must be one of",
    ("generate", "x", "--speculative-config", '{"method": "ngram"'): "not valid JSON",
    ("generate", "x", "--speculative-config", "[" * 100_000): "not valid JSON",
    ("generate", "x", "--speculative-config", "[1]"): "must be a JSON object",
    ("generate", "x", "--no-speculation", "--speculative-config", NGRAM): "give one",
    ("generate", "x", "--speculative-config", '{"method": "nonsense"}'): "nonsense",
    ("generate", "x", "--speculative-config", '{"methd": "ngram"}'): "methd",
    ("generate", " "): "empty",
    ("generate", "--file", "nowhere.txt"): "cannot read nowhere.txt",
    ("generate", "x", "--file", "nowhere.txt"): "use one of the two",
    ("generate", "x", "--enable-prefix-caching", "--no-enable-prefix-caching"): "give one",
    ("generate", "x", "--temperature", "-1"): "temperature",
    ("generate", "x", "--max-tokens", "0"): "max_tokens",
    ("generate", "x", "--n", "0"): "n must be",
    ("generate", "x", "--sanitizer", "perhaps"): "sanitizer must be one of",
    ("generate", "x", "--device", "abacus"): "abacus",
    ("generate", "x", "--kv-cache-memory-bytes", "10"): "memory",
    ("chat", "--once", " "): "--once needs a prompt",
    ("chat", "one-model", "--model", "another"): "two models",
    ("doctor", "a", "--model", "b"): "two models",
    ("doctor", "--no-speculation", "--method", "ngram"): "give one",
    ("doctor", "--no-speculation", "--lossless"): "leave --no-speculation out",
    ("doctor", "--memory", "--lossless"): "exclude each other",
    ("doctor", "--memory", "--kv-retention", "some"): "kv_retention must be dense, tail",
    ("doctor", "--method", "oracle"): "known methods: ngram, dflash",
    ("doctor", "--method", "dflash", "--speculative-config", '{"method": "eagle"}'): "give one",
    ("doctor", "--drafter", "a", "--method", "dflash", "--speculative-config", '{"model": "b"}'): "give one",
    ACCEPTANCE: "--method",
    (*DRAFTERS, "--speculative-config", '{"methods": "ngram"}'): "methods",
    (*DRAFTERS, "--speculative-config", '{"draft_vocab_size": 9}'): "leave draft_vocab_size out",
    (*DRAFTERS, "--temperature", "0"): "--no-sampled",
    (*ACCEPTANCE, "--method", "draft_model"): "needs 'model'",
    # Options of other engines are answered with ours.
    ("serve", "--ctx-size", "100"): "--max-model-len",
    ("chat", "-c", "100"): "--max-model-len",
    ("serve", "--context-length=100"): "--max-model-len",
    ("generate", "x", "--n-predict", "5"): "--max-tokens",
    ("serve", "--mem-fraction-static", "0.5"): "--gpu-memory-utilization",
    ("serve", "--tensor-parallel-size", "2"): "one device",
    ("serve", "--tp", "2"): "one device",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=lambda arguments: " ".join(arguments)[:80])
def test_a_mistake_is_one_line_and_status_2(
    tiny: Outrider, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"prompt": "Hello"}\n')
    run = tiny(*arguments)
    assert run.status == 2
    assert run.out == ""
    assert run.err.startswith("error: ")
    assert MISTAKES[arguments] in run.err
    assert len(run.err.splitlines()) == 1


def test_an_unknown_model_is_one_line(outrider: Outrider) -> None:
    run = outrider("generate", "x", "--model", "nowhere", "--backend", "reference")
    assert run.status == 2
    assert run.err.startswith("error: model 'nowhere' is not known")
