"""The whole engine on this backend, interpreted: text equal to the reference's, whatever the cache, the drafter or a
shortage does. `test_triton.py` runs this in a process of its own; it has no GPU and needs none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model, tiny_spec
from tests.speculative.cases import ONE_OF_EACH, three_layers
from tests.speculative.recording import Recorder, mostly_right
from tests.speculative.tiny import settings_for

from outrider.api.llm import LLM
from outrider.backends.cuda.backend import CudaBackend
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel
from outrider.models.parameters import written_out
from outrider.models.spec import Activation
from outrider.sampling import SamplingParams

FAMILIES: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed windows": {"windows": (8, None)},
    "gemma": {
        "windows": (5, None),
        "activation": Activation.GELU_TANH,
        "attention_softcap": 2.0,
        "embedding_scale": 5.5,
    },
    "capped logits": {"logit_softcap": 3.0},
}
SHARED = [7, 8, 9, 10, 11, 12] * 3
PROMPTS = [SHARED + [3], SHARED + [4, 5], [9, 8, 7, 9, 8, 7, 9]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=7),
    SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=7, presence_penalty=0.5),
    SamplingParams(temperature=1.0, seed=5, max_tokens=7),
]
"""Greedy, drawn with settings that depend on earlier tokens, and drawn."""


def interpreted(model: LoadedModel, **settings: Any) -> Engine:
    return tiny_engine(model, **{"backend": "cuda", "block_size": 8} | settings)


def expected_of(model: LoadedModel) -> list[list[int]]:
    plain = LLM.over(tiny_engine(model, enable_prefix_caching=False))
    return [tokens_of(plain.generate([prompt], each))[0] for prompt, each in zip(PROMPTS, PARAMS, strict=True)]


def graphs_of(engine: Engine) -> Any:
    backend = engine.runner.backend
    assert isinstance(backend, CudaBackend)
    return backend.graphs.counts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_the_text_of_the_reference(family: str) -> None:
    model = tiny_model(tiny_spec(**FAMILIES[family]))
    engine = interpreted(model, speculate=family != "full")
    expected = expected_of(model)
    assert tokens_of(LLM.over(engine).generate(PROMPTS, PARAMS)) == expected
    # Again, now that everything is cached.
    assert tokens_of(LLM.over(engine).generate(PROMPTS, PARAMS)) == expected
    assert engine.scheduler.kv.hit_tokens > 0
    assert graphs_of(engine).replayed > 0


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_every_drafter_leaves_the_text_as_it_is(case: Any, tmp_path: Path) -> None:
    target = three_layers()
    expected = expected_of(target)
    backend = CudaBackend("cpu")
    texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    drafter = Recorder(
        case.load(tmp_path, target, settings_for(target, page_tokens=8, backend=backend)), mostly_right(texts)
    )
    engine = interpreted(target, drafter=drafter, method=case.method)
    for _ in range(2):
        assert tokens_of(LLM.over(engine).generate(PROMPTS, PARAMS)) == expected
    counts = engine.speculation
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    assert engine.scheduler.kv.hit_tokens > 0


def test_a_draft_model_of_the_same_backend() -> None:
    model = tiny_model()
    for draft in (model, first_layers(model, 1)):
        engine = interpreted(model, drafter=tiny_draft_model(model, draft, block_size=8))
        assert tokens_of(LLM.over(engine).generate(PROMPTS, PARAMS)) == expected_of(model)


@pytest.mark.parametrize("speculate", [False, True])
def test_preemption_leaves_the_text_as_it_is(speculate: bool) -> None:
    model = tiny_model()
    # Little more than one request of the largest size needs, so that many cannot stay.
    memory = 80 * 2 * 2 * model.spec.kv_size * 4
    engine = interpreted(model, kv_cache_memory_bytes=memory, max_model_len=56, speculate=speculate)
    params = [replace(each, max_tokens=24) for each in PARAMS]
    plain = LLM.over(tiny_engine(model, enable_prefix_caching=False))
    expected = [tokens_of(plain.generate([prompt], each))[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert tokens_of(LLM.over(engine).generate(PROMPTS, params)) == expected
    assert engine.scheduler.num_preemptions > 0


def test_forks_write_what_they_write_on_the_reference() -> None:
    model = tiny_model()
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=8)
    expected = tokens_of(LLM.over(tiny_engine(model)).generate([SHARED], params))
    for speculate in (False, True):
        engine = interpreted(model, speculate=speculate)
        assert tokens_of(LLM.over(engine).generate([SHARED], params)) == expected


def test_half_precision_runs_with_the_sanitizer_on() -> None:
    model = tiny_model()
    narrow = replace(model, parameters=written_out(model.parameters, torch.float16))
    engine = interpreted(narrow, speculate=True, dtype="float16")
    again = interpreted(narrow, dtype="float16", enable_prefix_caching=False)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    assert tokens_of(LLM.over(engine).generate(PROMPTS, greedy)) == tokens_of(LLM.over(again).generate(PROMPTS, greedy))
