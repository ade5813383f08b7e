"""A decode worker takes the prefill worker's first token only if that was drawn as it would draw it itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.transfer.workers import ask, assert_nothing_left, make_model, make_worker

from outrider.engine.transfers import settings_digest
from outrider.grammar import Grammar, GrammarKind
from outrider.sampling import SamplingParams

BASE = SamplingParams(temperature=0.9, seed=3, max_tokens=8, logprobs=1)
OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_p": 0.5},
    {"top_k": 3},
    {"min_p": 0.2},
    {"seed": 4},
    {"seed": None},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"logit_bias": {5: 3.0}},
    {"allowed_token_ids": [4, 5, 6]},
    {"min_tokens": 1},
    {"logprobs": None},
    {"logprobs": 2},
    {"grammar": Grammar(kind=GrammarKind.REGEX, text="[ab]*")},
)
SAME: tuple[dict[str, Any], ...] = (
    {"max_tokens": 1},
    {"n": 3},
    {"stop": ["x"]},
    {"stop_token_ids": [7]},
    {"ignore_eos": True},
    {"prompt_logprobs": 1},
    {"skip_special_tokens": False},
)


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_settings_that_the_first_token_depends_on_change_the_digest(changes: dict[str, Any]) -> None:
    assert settings_digest(replace(BASE, **changes)) != settings_digest(BASE)


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_other_settings_do_not(changes: dict[str, Any]) -> None:
    assert settings_digest(replace(BASE, **changes)) == settings_digest(BASE)


def test_how_long_the_text_must_be_matters_only_for_whether_it_may_end() -> None:
    assert settings_digest(replace(BASE, min_tokens=1)) == settings_digest(replace(BASE, min_tokens=5))
    assert settings_digest(replace(BASE, min_tokens=1, stop_token_ids=[7])) != settings_digest(
        replace(BASE, min_tokens=1)
    )


def test_a_first_token_that_was_drawn_otherwise_is_drawn_again_with_the_text_of_one_worker(tmp_path: Path) -> None:
    model = make_model("mixed")
    prefill = make_worker(model, "eagle3", tmp_path, "kv_producer")
    decode = make_worker(model, "eagle3", tmp_path, "kv_consumer")
    single = make_worker(model, "eagle3", tmp_path, None)
    for number, changes in enumerate(({}, {"temperature": 0.1}, {"seed": 5}, {"min_tokens": 1}, {"logprobs": None})):
        prompt = [number, *range(3, 36)]
        handed = ask(prefill, "r", prompt, replace(BASE, **changes), hand_over=True)
        taken, alone = ask(decode, "r", prompt, BASE, ticket=handed.ticket), ask(single, "r", prompt, BASE)
        (one,), (other,) = taken.outputs, alone.outputs
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids)
        # Drawing the first token takes the prompt's last row.
        assert taken.metrics.transferred_tokens == len(prompt) - bool(changes)
        assert taken.error is None
    for engine in (prefill, decode):
        assert_nothing_left(engine)
        engine.close()
