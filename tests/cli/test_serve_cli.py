"""What `outrider serve` says when it is ready."""

from __future__ import annotations

import msgspec
import pytest
from tests.server.facts import FACTS

from outrider.cli.serve import _announce
from outrider.server.config import ServerConfig

DRAFTING = msgspec.structs.replace(FACTS, drafter="ngram", drafts_max=1)


@pytest.mark.parametrize(
    ("keys", "said"), [((), "no API key needed"), (("a" * 16,), "1 API key\n"), (("a" * 16, "b" * 16), "2 API keys\n")]
)
def test_keys_are_counted(keys: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    _announce("http://127.0.0.1:8000", DRAFTING, ServerConfig(api_keys=keys))
    announced = capsys.readouterr().err
    assert said in announced
    assert "ngram drafts up to 1 token ·" in announced
