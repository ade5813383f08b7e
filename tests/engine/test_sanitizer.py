"""The sanitizer on a real engine: level `plan` believes what the runner reports, level `bytes` looks at memory."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.tiny import tiny_engine
from torch import Tensor

from outrider.api.llm import LLM
from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.reference.backend import ReferenceBackend
from outrider.engine.engine import Engine
from outrider.errors import InvariantViolation
from outrider.runner.tables import BlockTables
from outrider.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT = list(range(48))
"""Three whole pages: the last one is copied when the prompt comes again."""


class StrayingBackend(ReferenceBackend):
    """Writes a key one page further than its plan says, once it is told to."""

    straying = False

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> Tensor:
        if self.straying:
            kv.keys[2] += 1.0
        return super().attend(qkv, layer, kv, metadata)


def engine_after_a_stray_write(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    """An engine of which a published page of PROMPT was written to while something else ran."""
    backend = StrayingBackend()
    monkeypatch.setattr("outrider.engine.build.select_backend", lambda *_args, **_options: backend)
    engine = tiny_engine(**settings)
    LLM.over(engine).generate([PROMPT], GREEDY)
    backend.straying = True
    LLM.over(engine).generate([[99] * 5], GREEDY)
    backend.straying = False
    return engine


def test_a_kernel_that_writes_where_its_plan_did_not_say_is_caught_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_after_a_stray_write(monkeypatch)
    with pytest.raises(InvariantViolation, match=r"I2 .* bytes of a published page have changed .* page 2,"):
        LLM.over(engine).generate([PROMPT], GREEDY)
    # At eviction too.
    with pytest.raises(InvariantViolation, match="bytes of a published page"):
        engine_after_a_stray_write(monkeypatch).reset_prefix_cache()


def test_level_plan_does_not_look_at_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_after_a_stray_write(monkeypatch, sanitizer_level="plan")
    assert LLM.over(engine).generate([PROMPT], GREEDY)[0].finished


def test_a_logging_sanitizer_lets_the_run_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_after_a_stray_write(monkeypatch, sanitizer="log")
    assert LLM.over(engine).generate([PROMPT], GREEDY)[0].finished
    assert engine.sanitizer is not None
    assert engine.sanitizer.violations
    assert "bytes of a published page" in caplog.text


def test_a_table_that_is_not_kept_up_to_date_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizer reads the very tables that the rows are made from."""
    llm = LLM.over(tiny_engine())
    llm.generate([PROMPT], GREEDY)
    assign = BlockTables.assign

    def stale(self: BlockTables, change: Any) -> None:
        assign(self, change)
        # Every sequence is sent to the first prompt's pages.
        self.array(0)[:, :3] = [[1, 2, 3]]

    monkeypatch.setattr(BlockTables, "assign", stale)
    with pytest.raises(InvariantViolation, match="a write outside the writer's reservation"):
        llm.generate([[77] * 40], GREEDY)
