"""The same text on a GPU, with the same code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.engine.lossless import tokens_of
from tests.engine.test_lossless import workload
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec
from tests.speculative.test_cuda import moved

from outrider.api.llm import LLM
from outrider.errors import ConfigError


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("windows", [(None, None), (8, None)])
def test_the_text_is_the_same_on_a_gpu(windows: tuple[int | None, ...], speculate: bool) -> None:
    here = tiny_model(tiny_spec(windows=windows))
    there = replace(here, parameters=moved(here.parameters, torch.device("cuda")))
    expected = tokens_of(LLM.over(tiny_engine(here)).generate(*workload()))
    engine = tiny_engine(there, speculate=speculate, device="cuda", dtype="float32", backend="auto")
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected


def test_a_model_that_lies_elsewhere_is_refused() -> None:
    here = tiny_model()
    elsewhere = replace(here, parameters=moved(here.parameters, torch.device("meta")))
    with pytest.raises(ConfigError, match="the model lies on meta"):
        tiny_engine(elsewhere)
