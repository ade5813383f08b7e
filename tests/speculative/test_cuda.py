"""The same drafts on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cases import moved
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import CASES, GREEDY, Case, assert_as_reference, plain_texts, prompts, three_layers
from tests.speculative.recording import Recorder, mostly_right
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.backends.registry import select_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_drafts_equal_the_reference(case: Case, tmp_path: Path) -> None:
    device, here = torch.device("cuda"), three_layers()
    target = replace(here, parameters=moved(here.parameters, device))
    texts = plain_texts(here)
    settings = settings_for(target, page_tokens=8, device=device, backend=select_backend("auto", device=device))
    recorder = Recorder(case.load(tmp_path, here, settings), mostly_right(texts))
    engine = tiny_engine(
        target, drafter=recorder, method=case.method, block_size=8, device="cuda", dtype="float32", backend="auto"
    )
    for _ in range(2):
        found = tokens_of(LLM.over(engine).generate(prompts(), GREEDY))
        assert found == [text[len(prompt) :] for prompt, text in zip(prompts(), texts, strict=True)]
    assert engine.scheduler.kv.hit_tokens > 0
    assert_as_reference(case, here, recorder)
