"""Texts are copied from finished requests of the same salt only, and no more once the prefix cache is reset."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model

from outrider.config import SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.sampling import SamplingParams
from outrider.scheduler.pacing.worth import Source

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPT = [5, 6, 7, 8, 9, 10]


def engine_of(drafter: str) -> Engine:
    """An engine that looks up whatever it can, and verifies all of it."""
    model = tiny_model()
    more: dict[str, Any] = {"speculate": True}
    if drafter == "draft model":
        more = {"drafter": tiny_draft_model(model, first_layers(model, 1)), "method": "draft_model"}
    engine = tiny_engine(model, k=None, **more)
    pacer = engine.pacer
    assert pacer is not None
    begin = pacer.begin

    def verify_all(decoding: Any, *, prompt_rows: int) -> Any:
        drafts = [request.drafts for request in decoding]
        pace = begin(decoding, prompt_rows=prompt_rows)
        for request, count in zip(decoding, drafts, strict=True):
            request.drafts = count
        return pace

    pacer.begin = verify_all  # type: ignore[method-assign]
    return engine


def ask(engine: Engine, salt: str, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """Returns what is said, and how often drafts came from another text."""
    assert engine.pacer is not None
    shared, note = [], engine.pacer.proposed

    def proposed(request: Any, found: Any) -> None:
        if found is not None and found.source is Source.SHARED_TEXT:
            shared.append(request)
        note(request, found)

    engine.pacer.proposed = proposed  # type: ignore[method-assign]
    engine.add_request("r", prompt, GREEDY, salt=salt)
    output = engine.output("r")
    while engine.has_work:
        engine.step()
    engine.pacer.proposed = note  # type: ignore[method-assign]
    return tokens_of([output])[0], len(shared)


@pytest.mark.parametrize("drafter", ["ngram", "draft model"])
def test_a_text_is_copied_by_its_own_salt_only(drafter: str) -> None:
    engine = engine_of(drafter)
    said, shared = ask(engine, "one")
    assert shared == 0
    for salt in ("", "two", "on", "one "):
        assert ask(engine, salt) == (said, 0), salt
    again, shared = ask(engine, "one")
    assert again == said
    assert shared > 0
    # What others have said since is no part of it.
    lookup = engine.runner.drafting.lookup
    assert lookup is not None
    assert lookup.shared_tokens > 0


@pytest.mark.parametrize("drafter", ["ngram", "draft model"])
def test_a_reset_of_the_prefix_cache_forgets_all_texts(drafter: str) -> None:
    engine = engine_of(drafter)
    lookup = engine.runner.drafting.lookup
    assert lookup is not None
    said, _shared = ask(engine, "one")
    assert ask(engine, "one")[1] > 0
    engine.reset_prefix_cache()
    assert lookup.shared_tokens == 0
    assert ask(engine, "one") == (said, 0)


def test_an_aborted_request_shares_nothing() -> None:
    engine = engine_of("ngram")
    lookup = engine.runner.drafting.lookup
    assert lookup is not None
    engine.add_request("r", PROMPT, GREEDY, salt="one")
    for _ in range(10):
        engine.step()
    engine.abort("r")
    assert lookup.shared_tokens == 0
    assert lookup.memory_bytes == 0
    assert ask(engine, "one")[1] == 0


@pytest.mark.parametrize("lookup", [None, True, False])
def test_whether_texts_are_looked_up_can_be_said(lookup: bool | None) -> None:
    model = tiny_model()
    config = SpeculativeConfig(method="draft_model", lookup=lookup)
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), speculative_config=config)
    assert engine.pacer is not None
    assert (engine.runner.drafting.lookup is None) == (lookup is False)


@pytest.mark.parametrize("fixed", [{"num_speculative_tokens": 3}, {"draft_confidence": 0.5}])
def test_nothing_is_looked_up_where_the_number_of_drafts_is_fixed(fixed: dict[str, Any]) -> None:
    model = tiny_model()
    config = SpeculativeConfig(method="draft_model", **fixed)
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), speculative_config=config)
    assert engine.pacer is None
    assert engine.runner.drafting.lookup is None
    with pytest.raises(ConfigError, match="lookup needs an engine that chooses"):
        SpeculativeConfig(method="draft_model", lookup=True, **fixed)


@pytest.mark.parametrize("wrong", [1, "yes", 0.0])
def test_lookup_is_a_yes_or_a_no(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="lookup must be true or false"):
        SpeculativeConfig(method="draft_model", lookup=wrong)
