"""What a drafter says is the same, whether its passes and the target's are recorded or called one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.backends.cpu.test_program import Eager
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import CASES, engine_with, prompts, three_layers
from tests.speculative.recording import Recorded

from outrider.api.llm import LLM
from outrider.backends.cpu.backend import CPUBackend
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams

SETTINGS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=4, max_tokens=14),
    SamplingParams(temperature=0, max_tokens=9, presence_penalty=0.8),
    SamplingParams(temperature=0, max_tokens=17, logprobs=1),
    SamplingParams(temperature=0.6, seed=5, max_tokens=11, n=2),
]


def said(
    name: str, directory: Path, confidence: float, monkeypatch: pytest.MonkeyPatch, *, records: bool
) -> tuple[list[list[int]], list[Recorded], list[Recorded]]:
    """Texts and drafts of requests one by one, then of some at a time that end one after the other."""
    backend = (CPUBackend if records else Eager)(2)
    monkeypatch.setattr("outrider.engine.build.select_backend", lambda *_args, **_options: backend)
    engine, recorder = engine_with(
        CASES[name],
        three_layers(),
        directory,
        drafter_backend=backend,
        backend="cpu",
        num_threads=2,
        draft_confidence=confidence,
        max_num_seqs=3,
    )
    recorder.cut = confidence > 0
    llm = LLM.over(engine)
    texts = [tokens_of(llm.generate([prompt], one)) for prompt, one in zip(prompts(), SETTINGS, strict=True)]
    alone = len(recorder.proposals)
    texts.append(tokens_of(llm.generate(prompts(), SETTINGS)))
    return [text for some in texts for text in some], recorder.proposals[:alone], recorder.proposals[alone:]


@pytest.mark.parametrize("confidence", [0.0, 0.02])
@pytest.mark.parametrize("name", ["full", "mixed", "speculators, sliding", "speculators, own everything"])
def test_drafts_are_those_of_calls(
    name: str, confidence: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, called = (said(name, tmp_path, confidence, monkeypatch, records=records) for records in (True, False))
    assert recorded == called
    assert recorded[1]
    assert recorded[2]


def test_a_drafter_may_go_to_another_engine(tmp_path: Path) -> None:
    """Feeding was recorded with the memory of the one before."""
    target = three_layers()
    engine, recorder = engine_with(
        CASES["full"], target, tmp_path, drafter_backend=CPUBackend(2), backend="cpu", num_threads=2
    )

    def drafts(of: Engine) -> list[Recorded]:
        recorder.proposals.clear()
        for prompt in prompts():
            LLM.over(of).generate([prompt], SETTINGS[0])
        return list(recorder.proposals)

    before = drafts(engine)
    assert before
    assert drafts(tiny_engine(target, drafter=recorder, method="dflash", block_size=8, backend="cpu")) == before
