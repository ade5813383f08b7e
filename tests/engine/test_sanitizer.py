"""The sanitizer on a real engine: level `plan` believes what the runner reports, level `bytes` looks at memory."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.tiny import tiny_engine
from torch import Tensor

from outrider.api.llm import LLM
from outrider.errors import InvariantViolation
from outrider.layers.attention import AttentionLayer, AttentionRows, PagedKV
from outrider.layers.ops import TorchOps
from outrider.runner.page_store import PageStore
from outrider.runner.tables import TableLines
from outrider.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT = list(range(48))
"""Three whole pages: the last one is copied when the prompt comes again."""


class StrayingOps(TorchOps):
    """Writes a key one page further than its plan says, once it is told to."""

    straying = False

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, rows: AttentionRows) -> Tensor:
        if self.straying:
            kv.keys[2] += 1.0
        return super().attend(qkv, layer, kv, rows)


def straying_engine(monkeypatch: pytest.MonkeyPatch, level: str) -> tuple[Any, StrayingOps]:
    ops = StrayingOps()
    monkeypatch.setattr("outrider.engine.build.select_ops", lambda *_args, **_options: ops)
    return tiny_engine(sanitizer_level=level), ops


def test_a_kernel_that_writes_where_its_plan_did_not_say_is_caught_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, ops = straying_engine(monkeypatch, "bytes")
    llm = LLM.over(engine)
    llm.generate([PROMPT], GREEDY)
    ops.straying = True
    # Something else runs, and writes into a page of the first prompt that is published.
    llm.generate([[99] * 5], GREEDY)
    ops.straying = False
    with pytest.raises(InvariantViolation, match=r"I2 .* bytes of a published page have changed .* page 2,"):
        llm.generate([PROMPT], GREEDY)


def test_level_plan_does_not_look_at_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ops = straying_engine(monkeypatch, "plan")
    llm = LLM.over(engine)
    llm.generate([PROMPT], GREEDY)
    ops.straying = True
    llm.generate([[99] * 5], GREEDY)
    ops.straying = False
    llm.generate([PROMPT], GREEDY)


def test_changed_bytes_are_noticed_at_eviction_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ops = straying_engine(monkeypatch, "bytes")
    llm = LLM.over(engine)
    llm.generate([PROMPT], GREEDY)
    ops.straying = True
    llm.generate([[99] * 5], GREEDY)
    with pytest.raises(InvariantViolation, match="bytes of a published page"):
        engine.scheduler.kv.reset_cache()


def test_a_copy_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a fully cached prompt is wrong if its last page is not copied; a real bug would look so."""
    right = LLM.over(tiny_engine()).generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    engine = tiny_engine()
    llm = LLM.over(engine)
    llm.generate([PROMPT], GREEDY)
    monkeypatch.setattr(PageStore, "copy", lambda self, copies: None)
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids != right


def test_a_table_that_is_not_kept_up_to_date_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizer keeps tables of its own; a runner whose tables are stale writes over pages that are published."""
    engine = tiny_engine()
    llm = LLM.over(engine)
    llm.generate([PROMPT], GREEDY)
    apply = TableLines.apply

    def stale(self: TableLines, plan: Any) -> None:
        apply(self, plan)
        for group in range(1):
            # Every sequence is sent to the first prompt's pages.
            self.array(group)[:, :3] = [[1, 2, 3]]

    monkeypatch.setattr(TableLines, "apply", stale)
    llm.generate([[77] * 40], GREEDY)
    monkeypatch.setattr(TableLines, "apply", apply)
    with pytest.raises(InvariantViolation, match="bytes of a published page"):
        llm.generate([PROMPT], GREEDY)


def test_a_logging_sanitizer_lets_the_run_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops = StrayingOps()
    monkeypatch.setattr("outrider.engine.build.select_ops", lambda *_args, **_options: ops)
    engine = tiny_engine(sanitizer="log")
    llm = LLM.over(engine)
    llm.generate([PROMPT], GREEDY)
    ops.straying = True
    llm.generate([[99] * 5], GREEDY)
    llm.generate([PROMPT], GREEDY)
    assert engine.sanitizer is not None
    assert engine.sanitizer.violations
    assert "bytes of a published page" in caplog.text
