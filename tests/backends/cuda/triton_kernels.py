"""The GPU's kernels against plain PyTorch: on a GPU where there is one, otherwise on Triton's interpreter.

Not collected with the other tests: `test_triton.py` runs this in a process that has Triton and its interpreter,
`scripts/test-gpu` runs it on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.backends.draws import random_columns, random_logits, settings
from tests.runner.chi_square import chi_square_p
from tests.tools.training.tiny import END, LENGTH, random_prompts, tiny_target
from torch import Tensor

from outrider.backends.cuda.backend import CudaBackend
from outrider.backends.reference.draw import draw
from outrider.tools.training.corpus import Streams
from outrider.tools.training.generate import Conversation, Lockstep, Opening
from outrider.tools.training.lockstep_triton import BLOCK_KEYS, BLOCK_VOCAB, attend_one, pick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_tensor(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (3, 64), (5, 80), (17, 24)])
@pytest.mark.parametrize("position", [0, 1, BLOCK_KEYS - 1, BLOCK_KEYS, BLOCK_KEYS + 1, 2 * BLOCK_KEYS + 3])
def test_one_token_is_written_and_sees_everything_up_to_itself(rows: int, dim: int, position: int) -> None:
    generator = torch.Generator().manual_seed(rows + position)
    dtype = torch.float32
    keys, values = (random_tensor(generator, 3, 2, 2 * BLOCK_KEYS + 9, dim, dtype=dtype) for _ in range(2))
    k, v = (random_tensor(generator, 3, 2, dim, dtype=dtype) for _ in range(2))
    q = random_tensor(generator, 3, 2, rows, dim, dtype=dtype) * dim**-0.5
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys[:, :, position], wanted_values[:, :, position] = k, v
    found = attend_one(q, k, v, keys, values, torch.tensor(position, device=DEVICE))
    # Nothing else has changed, before or behind it.
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)
    weights = torch.softmax(q @ keys[:, :, : position + 1].mT, dim=-1)
    torch.testing.assert_close(found, weights @ values[:, :, : position + 1], atol=1e-5, rtol=1e-4)


def test_what_does_not_lie_together_is_read_as_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    keys, values = (random_tensor(generator, 2, 1, 40, 16, dtype=torch.float32) for _ in range(2))
    pairs = random_tensor(generator, 2, 1, 32, dtype=torch.float32)
    q = random_tensor(generator, 2, 1, 16, 4, dtype=torch.float32).mT
    place = torch.tensor(20, device=DEVICE)
    found = attend_one(q, pairs[..., :16], pairs[..., 16:], keys, values, place)
    again = attend_one(q.clone(), pairs[..., :16].clone(), pairs[..., 16:].clone(), keys, values, place)
    assert torch.equal(found, again)


@pytest.mark.parametrize("vocab", [1, 7, BLOCK_VOCAB, BLOCK_VOCAB + 1, 2 * BLOCK_VOCAB + 5])
def test_without_temperature_the_first_of_the_largest_is_picked(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Whole numbers: most rows have several that are largest.
    logits = random_tensor(generator, 6, vocab, dtype=torch.float32).mul(2).round()
    logits[0] = -torch.inf
    logits[0, -1] = -3.0
    found = pick(logits, torch.zeros(6, device=DEVICE), torch.tensor(11, device=DEVICE))
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert found.tolist() == first.tolist()


@pytest.mark.parametrize("heat", [0.5, 1.3])
def test_tokens_are_picked_as_often_as_they_are_likely(heat: float) -> None:
    rows = 3000
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0, -torch.inf, 0.0], device=DEVICE)
    found = pick(
        logits.expand(rows, -1).contiguous(),
        torch.full((rows,), heat, device=DEVICE),
        torch.tensor(1 << 60, device=DEVICE),
    )
    wanted = torch.softmax(logits.double() / heat, dim=-1) * rows
    counts = torch.bincount(found, minlength=6)
    assert counts[4] == 0
    likely = wanted > 0
    assert chi_square_p(counts[likely].tolist(), wanted[likely].tolist()) > 1e-3


def test_every_row_of_every_step_has_noise_of_its_own() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = random_tensor(generator, 1, 500, dtype=torch.float32).expand(8, -1).contiguous()
    heat = torch.ones(8, device=DEVICE)
    first = pick(logits, heat, torch.tensor(100, device=DEVICE)).tolist()
    assert len(set(first)) > 4
    # A row's noise is that of key + row, so that steps go on where the rows of the one before ended.
    assert pick(logits, heat, torch.tensor(103, device=DEVICE)).tolist()[:5] == first[3:]
    heat[2] = 0.0
    mixed = pick(logits, heat, torch.tensor(100, device=DEVICE)).tolist()
    assert mixed == [*first[:2], int(logits[2].argmax()), *first[3:]]


def written(*, fused: bool, temperature: float) -> Streams:
    conversation = Conversation(end=END, to_question=(7, 8), to_answer=(9,), question_temperature=0.0)
    lockstep = Lockstep(tiny_target(), streams=5, length=LENGTH, conversation=conversation, seed=4)
    lockstep.fused = fused
    openings = [Opening(ids=ids[: 3 + number], temperature=0.0) for number, ids in enumerate(random_prompts(5))]
    openings[-1] = replace(openings[-1], temperature=temperature, turns=((1, 2), (3,)))
    return lockstep.run(openings)


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiny target lies on the CPU")
def test_conversations_are_the_same_with_these_kernels() -> None:
    plain, fused = (written(fused=fused, temperature=0.0) for fused in (False, True))
    assert (plain.tokens == fused.tokens).all()
    assert (plain.roles == fused.roles).all()
    sampled = written(fused=True, temperature=1.0)
    assert (sampled.tokens[:-1] == fused.tokens[:-1]).all()
    assert (sampled.tokens[-1] != fused.tokens[-1]).any()


@pytest.mark.parametrize("vocab_size", [7, 257, 5000])
def test_draws_are_those_of_the_reference(vocab_size: int) -> None:
    rng, backend = random.Random(vocab_size), CudaBackend(DEVICE)
    for _ in range(3):
        logits, columns = random_logits(rng, 6, vocab_size).to(DEVICE), random_columns(rng, 6, vocab_size)
        for chosen in (columns, columns | {"top_k": [0] * 6, "top_p": [1.0] * 6}):
            assert (
                backend.draw(logits, settings(chosen, DEVICE)).tolist()
                == draw(logits, settings(chosen, DEVICE)).tolist()
            )
