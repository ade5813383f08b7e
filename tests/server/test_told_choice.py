"""What an engine says about its choice arrives in the front end as it was."""

from __future__ import annotations

from tests.engine.tiny import tiny_model

from outrider.api.llm import LLM
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams
from outrider.scheduler.pacing.figures import SOURCES
from outrider.server.engine_process.facts import counters_of, speculation_of
from outrider.server.messages import Speculation, StepReport, decode_to_front, encode
from outrider.server.routes.speculation import as_json


def used(speculation: SpeculativeConfig | None) -> Engine:
    """An engine that has written some text which repeats itself."""
    config = EngineConfig(
        backend="reference", device="cpu", kv_cache_memory_bytes=1 << 22, speculative_config=speculation
    )
    engine = build_engine(config, model=tiny_model())
    LLM.over(engine).generate([1, 2, 3] * 6, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    return engine


def test_a_choice_is_told_with_its_reasons() -> None:
    engine = used(SpeculativeConfig(method="ngram"))
    assert engine.pacer is not None
    told = decode_to_front(encode(speculation_of(engine, 7)))
    assert isinstance(told, Speculation)
    assert told.choice == engine.pacer.describe()
    assert told.counts == engine.pacer.counts
    shown = as_json(told)
    assert shown["chooses"] is True
    assert tuple(shown["sources"]) == SOURCES
    assert shown["sources"]["own_text"]["offered"] > 0
    assert shown["lookup"]["lookups"] > 0
    assert shown["costs"]["target"]
    counters = counters_of(engine, prompt_tokens=1, generated_tokens=1, aborted=0)
    report = decode_to_front(encode(StepReport(deltas=[], counters=counters, gaps_s=[])))
    assert isinstance(report, StepReport)
    assert report.counters == counters
    assert counters.choice == told.choice
    assert counters.lookups == shown["lookup"]["lookups"]


def test_an_engine_with_a_fixed_number_of_drafts_tells_that_number_only() -> None:
    told = decode_to_front(encode(speculation_of(used(SpeculativeConfig(method="ngram", num_speculative_tokens=3)), 1)))
    assert isinstance(told, Speculation)
    shown = as_json(told)
    assert (shown.pop("drafter"), shown.pop("num_speculative_tokens"), shown.pop("chooses")) == ("ngram", 3, False)
    assert set(shown.values()) == {None}
