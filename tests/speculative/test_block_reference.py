"""DFlash drafts equal those of a dense reference, whatever happened to the request before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec
from tests.speculative.block_cases import CASES, BlockCase, reference_logits, save_block
from tests.speculative.recording import Recorder, mostly_right
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams
from outrider.speculative.checkpoints.dflash import load_dflash

TIE = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_model(tiny_spec(windows=(None, 7, None)))


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(40)]
    return [shared + [rng.randrange(256) for _ in range(n)] for n in (1, 5, 9)] + [[7, 8, 9], [1]]


def assert_as_reference(case: BlockCase, target: LoadedModel, recorder: Recorder) -> None:
    assert recorder.proposals
    for tokens, k, drafts in recorder.proposals:
        logits = reference_logits(case, target, tokens, k)
        best = logits.max(-1).values
        for place, draft in enumerate(drafts):
            gap = float(best[place] - logits[place, draft])
            assert gap < TIE, f"draft {place} of {k} after {len(tokens)} tokens is {gap} below the best"


def engine_with(
    case: BlockCase, target: LoadedModel, path: Path, texts: list[list[int]], *, block_size: int = 8, **more: Any
) -> tuple[Engine, Recorder]:
    drafter = load_dflash(str(save_block(path, case, target)), settings_for(target, page_tokens=block_size))
    recorder = Recorder(drafter, mostly_right(texts))
    return tiny_engine(target, drafter=recorder, method="dflash", block_size=block_size, **more), recorder


@pytest.fixture(scope="module")
def texts(target: LoadedModel) -> list[list[int]]:
    plain = LLM.over(tiny_engine(target, enable_prefix_caching=False))
    return [p + tokens_of(plain.generate([p], GREEDY))[0] for p in prompts()]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_drafts_equal_the_reference(case: BlockCase, target: LoadedModel, texts: Any, tmp_path: Path) -> None:
    """Prompts in one piece, drafts accepted in part, then everything again from the prefix cache."""
    engine, recorder = engine_with(case, target, tmp_path, texts)
    for _ in range(2):
        found = tokens_of(LLM.over(engine).generate(prompts(), GREEDY))
        assert found == [text[len(p) :] for p, text in zip(prompts(), texts, strict=True)]
    assert engine.scheduler.kv.hit_tokens > 0
    assert 0 < engine.speculation.accepted_tokens < engine.speculation.draft_tokens
    assert_as_reference(case, target, recorder)
