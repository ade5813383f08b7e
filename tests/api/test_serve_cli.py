"""What `outrider serve` says when it is ready."""

from __future__ import annotations

import pytest

from outrider.api.cli.serve import _announce
from outrider.server.config import ServerConfig
from outrider.server.messages import Facts

FACTS = Facts(
    model_name="tiny",
    fingerprint="",
    max_model_len=128,
    max_num_seqs=4,
    vocab_size=256,
    device="cpu",
    dtype="float32",
    tokenizer="",
    tokenizer_source="",
    bos_id=None,
    eos_ids=(),
    templates={},
    template_source="",
    template_variables={},
    sampling_defaults={},
    drafter="ngram",
    drafts_max=1,
    kv_tokens=128,
    supports_grammars=False,
    sanitizer="off",
)


@pytest.mark.parametrize(
    ("keys", "said"), [((), "no API key needed"), (("a" * 16,), "1 API key\n"), (("a" * 16, "b" * 16), "2 API keys\n")]
)
def test_keys_are_counted(keys: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    _announce("http://127.0.0.1:8000", FACTS, ServerConfig(api_keys=keys))
    announced = capsys.readouterr().err
    assert said in announced
    assert "ngram drafts up to 1 token ·" in announced
