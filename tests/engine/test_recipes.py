"""Every family says what Transformers says, token for token, with windows shorter than the prompt and drafts on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lossless import assert_greedy_by_reference, reference_logits, tokens_of
from tests.engine.tiny import tiny_engine
from tests.models.fakes import FAMILIES, save
from tests.models.fakes import tiny_model as reference_model
from tests.models.test_gpt_oss import save_quantised

from outrider.api.llm import LLM
from outrider.backends.cpu.packing import CPUWeightForms
from outrider.models.load import LoadedModel, load_model
from outrider.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Up to ten times as long as the shortest window."""
    rng = random.Random(1)
    return [[rng.randrange(60) for _ in range(length)] for length in (1, 5, 17, 40, 85)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_references(family: str, backend: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    model = load_model(str(save(reference, tmp_path)), dtype=torch.float32)
    settings: dict[str, Any] = {"backend": backend, "max_model_len": 128, "block_size": 8}
    plain, drafting = (LLM.over(tiny_engine(model, speculate=speculate, **settings)) for speculate in (False, True))
    expected = tokens_of(plain.generate(prompts(), GREEDY))
    assert tokens_of(drafting.generate(prompts(), GREEDY)) == expected
    # And from the cache: what lies under the windows where the longest prompt ends.
    assert tokens_of(drafting.generate(prompts()[-1:], GREEDY)) == expected[-1:]
    alignment = drafting.engine.scheduler.kv.layout.alignment
    assert drafting.engine.scheduler.kv.hit_tokens >= (len(prompts()[-1]) - 1) // alignment * alignment > 0
    for prompt, generated in zip(prompts(), expected, strict=True):
        assert len(generated) == 40
        assert_greedy_by_reference(reference, prompt, generated)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_references(family: str, backend: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    model = load_model(str(save(reference, tmp_path)), dtype=torch.float32)
    assert_log_probabilities(model, reference, backend)


def assert_log_probabilities(model: LoadedModel, reference: Any, backend: str) -> None:
    prompt = prompts()[-1]
    # In chunks of odd sizes, so that rows meet keys of earlier steps.
    engine = tiny_engine(model, backend=backend, max_model_len=128, max_num_batched_tokens=13, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = LLM.over(engine).generate([prompt], params)[0].prompt_logprobs
    assert found is not None
    expected = torch.log_softmax(reference_logits(reference, prompt), dim=-1)[:-1]
    wanted = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in found if entry is not None]), wanted, atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_moe"])
def test_weights_of_16_bits_are_computed_with_in_32(family: str, tmp_path: Path) -> None:
    """Experts and embeddings stay as they are stored; nothing is rounded but what was rounded in the file."""
    stored = reference_model(family).bfloat16()
    model = load_model(str(save(stored, tmp_path)), dtype=torch.float32, forms=CPUWeightForms(packed=True))
    assert model.parameters.embedding.dtype == torch.bfloat16
    assert_log_probabilities(model, type(stored).from_pretrained(tmp_path, dtype=torch.float32).eval(), "cpu")


def test_experts_quantised_as_mxfp4_are_those_of_the_reference(tmp_path: Path) -> None:
    reference = save_quantised(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, forms=CPUWeightForms(packed=True))
    assert_log_probabilities(model, reference.float(), "cpu")
