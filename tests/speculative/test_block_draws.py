"""Drafts of a block are drawn at once, except where one draft has a say in the next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import CASES, engine_with, three_layers
from torch import Tensor

from outrider.api.llm import LLM
from outrider.sampling import SamplingParams
from outrider.speculative.drafter import DraftServices, DrawRow, ProposeRow
from outrider.speculative.drafters.dflash import draw_block
from outrider.speculative.vocabulary import DraftVocabulary

WHOLE = DraftVocabulary(size=6)


class Asked:
    def __init__(self, name: str, *, draws_depend: bool) -> None:
        self.id, self.table_row, self.draws_depend = name, 0, draws_depend
        self.tokens = array("I", [1])


def services(calls: list[list[DrawRow]]) -> DraftServices:
    def draw(logits: Tensor, rows: Sequence[DrawRow], _vocabulary: DraftVocabulary, _argmax: Any = None) -> list[int]:
        assert len(logits) == len(rows)
        calls.append(list(rows))
        return logits.argmax(-1).tolist()

    unused: Any = None
    return DraftServices(batches=unused, groups=range(0), kv=(), draw=draw, worth_going_on=lambda _: True)


def test_all_at_once_unless_draws_depend_on_each_other() -> None:
    free, bound = Asked("free", draws_depend=False), Asked("bound", draws_depend=True)
    rows = [ProposeRow(free, 4, 3), ProposeRow(bound, 9, 2), ProposeRow(free, 6, 1)]
    logits = torch.eye(6)
    calls: list[list[DrawRow]] = []
    assert draw_block(services(calls), rows, logits, WHOLE) == [[0, 1, 2], [3, 4], [5]]
    assert [len(call) for call in calls] == [5, 1]
    assert [draw.position for draw in calls[0]] == [5, 6, 7, 10, 7]
    assert calls[1] == [DrawRow(bound, 11, (3,))]


def test_penalties_count_the_drafts_before(tmp_path: Any) -> None:
    """A strong penalty on what was said already: no block repeats itself."""
    target = three_layers()
    params = SamplingParams(temperature=0, max_tokens=12, frequency_penalty=2.0, presence_penalty=2.0)
    strong = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=100.0)
    for wanted in (params, strong):
        engine, recorder = engine_with(CASES["full"], target, tmp_path, k=5)
        found = LLM.over(engine).generate([[1, 2, 3]], wanted)[0].outputs[0].token_ids
        assert found == LLM.over(tiny_engine(target)).generate([[1, 2, 3]], wanted)[0].outputs[0].token_ids
    assert all(len(set(proposal.drafts)) == proposal.k for proposal in recorder.proposals)
