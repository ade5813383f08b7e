"""Drafting from the most frequent tokens only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import CASES, engine_with, prompts, three_layers
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.errors import ConfigError, ModelError
from outrider.sampling import SamplingParams
from outrider.speculative.checkpoints.frequent import FREQUENT_TOKENS, read_frequent

CASE = CASES["full"]
TOKENS = [200, 3, 77, 15, 4, 99, 250, 0, 31, 8]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_only_listed_tokens_are_drafted(temperature: float, tmp_path: Path) -> None:
    target = three_layers()
    CASE.save(tmp_path, target)
    (tmp_path / FREQUENT_TOKENS).write_text(json.dumps(TOKENS))
    settings = settings_for(target, page_tokens=8, draft_vocab_size=6)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=24)

    def said(draft_vocab_size: int | None) -> tuple[list[list[int]], set[int]]:
        engine, recorder = engine_with(CASE, target, tmp_path, draft_vocab_size=draft_vocab_size)
        found = [output.outputs[0].token_ids for output in LLM.over(engine).generate(prompts(), params)]
        return found, {draft for proposal in recorder.proposals for draft in proposal.drafts}

    everything, all_drafts = said(None)
    limited, drafts = said(settings.draft_vocab_size)
    assert limited == everything
    assert drafts <= set(TOKENS[:6])
    assert len(drafts) > 1
    assert not all_drafts <= set(TOKENS)


def test_what_a_request_rules_out_is_not_drafted_either(tmp_path: Path) -> None:
    """Nor does it end the request where nothing is left to draft."""
    target = three_layers()
    CASE.save(tmp_path, target)
    (tmp_path / FREQUENT_TOKENS).write_text(json.dumps(TOKENS))
    few = {
        "biased": {"logit_bias": dict.fromkeys(TOKENS[:4], -100.0)},
        "others only": {"allowed_token_ids": [1, 2, 5, 6]},
    }
    for name, changes in few.items():
        params = SamplingParams(temperature=0.0, max_tokens=24, **changes)  # type: ignore[arg-type]
        engine, recorder = engine_with(CASE, target, tmp_path, draft_vocab_size=6)
        found = tokens_of(LLM.over(engine).generate(prompts(), params))
        assert found == tokens_of(LLM.over(tiny_engine(target)).generate(prompts(), params))
        drafts = {draft for proposal in recorder.proposals for draft in proposal.drafts}
        assert drafts == (set(TOKENS[4:6]) if name == "biased" else {0})


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        ("[1, 2", 2, "cannot be read as JSON"),
        ("[" * 100_000, 2, "cannot be read as JSON"),
        ('{"a": 1}', 2, "must be a list of token ids"),
        ("[]", 2, "must be a list of token ids"),
        ("[1, true]", 2, "must be a list of token ids"),
        ("[1, 2.0]", 2, "must be a list of token ids"),
        ("[1, 1]", 2, "each once"),
        ("[1, -1]", 2, "0 to 255"),
        ("[1, 256]", 2, "0 to 255"),
        ("[1, 2]", 3, "has only 2 tokens"),
        (None, 3, f"no {FREQUENT_TOKENS}"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(content: str | None, size: int, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / FREQUENT_TOKENS).write_text(content)
    with pytest.raises((ModelError, ConfigError), match=message):
        read_frequent(tmp_path, settings_for(three_layers(), draft_vocab_size=size))


def test_a_list_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FREQUENT_TOKENS).write_text("[1, 2]")

    def denied(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ModelError, match=f"{FREQUENT_TOKENS} cannot be read as JSON .*Permission denied.*; remove it"):
        read_frequent(tmp_path, settings_for(three_layers(), draft_vocab_size=2))


def test_a_drafter_with_a_head_of_its_own_is_not_limited_further(tmp_path: Path) -> None:
    target, case = three_layers(), CASES["speculators, own everything"]
    case.save(tmp_path, target)
    (tmp_path / FREQUENT_TOKENS).write_text(json.dumps(TOKENS))
    with pytest.raises(ConfigError, match=r"has a head of its own, .*leave draft_vocab_size out"):
        case.load(tmp_path, target, settings_for(target, page_tokens=8, draft_vocab_size=6))
    # Nor is it by default, although there is a list.
    case.load(tmp_path, target, settings_for(target, page_tokens=8, packed=True))


def test_all_tokens_are_drafted_from_unless_weights_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**settings: Any) -> list[int] | None:
        tokens = read_frequent(tmp_path, settings_for(three_layers(), **settings))
        return None if tokens is None else tokens.tolist()

    assert found(packed=True) is None
    assert found(draft_vocab_size=256) is None
    (tmp_path / FREQUENT_TOKENS).write_text(json.dumps(TOKENS))
    assert found() is None
    assert found(packed=True) == sorted(TOKENS)
    monkeypatch.setattr("outrider.speculative.checkpoints.frequent.USUAL_SIZE", 4)
    assert found(packed=True) == sorted(TOKENS[:4])
    assert found(packed=True, draft_vocab_size=0) is None
    assert found(packed=True, draft_vocab_size=256) is None
    assert found(draft_vocab_size=3) == [3, 77, 200]
