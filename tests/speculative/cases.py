"""All random drafters, and how a run with one of them is compared with its reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec
from tests.speculative.ahead_cases import AHEAD_CASES
from tests.speculative.block_cases import BLOCK_CASES
from tests.speculative.recording import Recorder, mostly_right
from tests.speculative.tiny import settings_for
from torch import Tensor

from outrider.api.llm import LLM
from outrider.backends.base import Backend
from outrider.engine.engine import Engine
from outrider.engine.ties import TIE_TOLERANCE
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams
from outrider.speculative.drafter import Drafter
from outrider.speculative.settings import DrafterSettings

GREEDY = SamplingParams(temperature=0, max_tokens=24)


class Case(Protocol):
    @property
    def method(self) -> str: ...

    def save(self, directory: Path, target: LoadedModel) -> Path: ...

    def load(self, directory: Path, target: LoadedModel, settings: DrafterSettings) -> Drafter: ...

    def logits(self, target: LoadedModel, tokens: Sequence[int], drafts: Sequence[int], limit: int) -> Tensor: ...


CASES: dict[str, Case] = {**BLOCK_CASES, **AHEAD_CASES}
ONE_OF_EACH = {
    name: CASES[name]
    for name in ("full", "mixed", "speculators, sliding", "eagle", "eagle3", "eagle3, speculators, norms", "mtp, qwen")
}


def three_layers() -> LoadedModel:
    return tiny_model(tiny_spec(windows=(None, 7, None)))


def prompts() -> list[list[int]]:
    """Some share a prefix; one is a single token."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(40)]
    return [shared + [rng.randrange(256) for _ in range(n)] for n in (1, 5, 9)] + [[7, 8, 9], [1]]


def plain_texts(target: LoadedModel, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Each prompt with what the target alone says."""
    plain = LLM.over(tiny_engine(target, enable_prefix_caching=False))
    return [prompt + tokens_of(plain.generate([prompt], params))[0] for prompt in prompts()]


def engine_with(
    case: Case,
    target: LoadedModel,
    directory: Path,
    texts: Sequence[Sequence[int]] = (),
    *,
    block_size: int = 8,
    max_len: int = 256,
    drafter_backend: Backend | None = None,
    draft_vocab_size: int | None = None,
    **more: Any,
) -> tuple[Engine, Recorder]:
    """An engine whose drafts are right in part, and what its drafter really said."""
    settings = settings_for(target, page_tokens=block_size, max_model_len=max_len, draft_vocab_size=draft_vocab_size)
    if drafter_backend is not None:
        settings = replace(settings, backend=drafter_backend)
    recorder = Recorder(case.load(directory, target, settings), mostly_right(texts) if texts else None)
    return tiny_engine(target, drafter=recorder, method=case.method, block_size=block_size, **more), recorder


def furthest_from_reference(case: Case, target: LoadedModel, recorder: Recorder) -> float:
    """How far below the reference's best logit a draft lies, at most."""
    assert recorder.proposals
    furthest = 0.0
    limit = recorder.footprint.max_len
    assert limit is not None
    for tokens, _k, drafts in recorder.proposals:
        logits = case.logits(target, tokens, drafts, limit)
        for place, draft in enumerate(drafts):
            furthest = max(furthest, float(logits[place].max() - logits[place, draft]))
    return furthest


def assert_as_reference(case: Case, target: LoadedModel, recorder: Recorder) -> None:
    furthest = furthest_from_reference(case, target, recorder)
    assert furthest < TIE_TOLERANCE, f"a draft is {furthest} below the reference's best"
