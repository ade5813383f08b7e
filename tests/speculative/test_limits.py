"""Near its limit a drafter drafts less for the request that is there, and for no other request."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import CASES, assert_as_reference, engine_with, three_layers

from outrider.api.llm import LLM
from outrider.errors import ConfigError
from outrider.sampling import SamplingParams

LIMIT = 100
LENGTHS = (96, 97, 98, 99)
NEIGHBOUR = [200, 1, 4]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", {96: 3, 97: 2, 98: 1}),
        ("mixed", {96: 3, 97: 2, 98: 1}),
        ("eagle3", {96: 3, 97: 3, 98: 2, 99: 1}),
        ("mtp, qwen", {96: 3, 97: 3, 98: 2, 99: 1}),
    ],
)
def test_only_the_request_near_the_limit_drafts_less(name: str, expected: dict[int, int], tmp_path: Path) -> None:
    """The drafter's limit is 100, the model's is larger; three drafts at most."""
    model, params = three_layers(), SamplingParams(temperature=0, max_tokens=20)
    prompts = [[length, *(n % 251 for n in range(length - 1))] for length in LENGTHS] + [NEIGHBOUR]
    plain = LLM.over(tiny_engine(model, enable_prefix_caching=False))
    texts = [tokens_of(plain.generate([prompt], params))[0] for prompt in prompts]
    engine, recorder = engine_with(CASES[name], model, tmp_path, max_len=LIMIT, k=3, max_num_batched_tokens=1024)
    assert tokens_of(LLM.over(engine).generate(prompts, params)) == texts
    assert_as_reference(CASES[name], model, recorder)
    # Each request's first proposal is made at the end of its prompt.
    first = {len(p.tokens) - 1: p.k for p in reversed(recorder.proposals) if p.tokens[0] + 1 == len(p.tokens)}
    assert first == expected
    assert max(len(p.tokens) - 1 + p.k for p in recorder.proposals if p.tokens[:3] != NEIGHBOUR) <= LIMIT
    beside = [p.k for p in recorder.proposals if p.tokens[:3] == NEIGHBOUR]
    # Until its own last tokens come into sight, the neighbour never drafts less.
    assert set(beside[:10]) == {3}


def test_one_batch_may_hold_different_numbers_of_drafts(tmp_path: Path) -> None:
    model = three_layers()
    for name in ("mixed", "eagle3"):
        engine, recorder = engine_with(CASES[name], model, tmp_path / name, k=4, max_num_batched_tokens=256)
        params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 5, 20)]
        LLM.over(engine).generate([[1, 2], [3, 4, 5], [6]], params)
        assert any(len(set(batch)) > 1 for batch in recorder.batches)
        assert_as_reference(CASES[name], model, recorder)


def test_a_block_that_no_step_can_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blocks have 5 rows"):
        engine_with(CASES["full"], three_layers(), tmp_path, k=2, max_num_batched_tokens=6)


def test_a_block_is_no_longer_than_the_drafters_limit(tmp_path: Path) -> None:
    """Blocks of four rows fit into a step of six; five would not."""
    model, params = three_layers(), SamplingParams(temperature=0, max_tokens=6)
    step = {"max_num_batched_tokens": 6, "max_num_seqs": 2}
    engine, recorder = engine_with(CASES["full"], model, tmp_path, max_len=4, k=2, **step)
    plain = LLM.over(tiny_engine(model, enable_prefix_caching=False))
    prompts = [[3], [4, 5, 6]]
    assert tokens_of(LLM.over(engine).generate(prompts, params)) == tokens_of(plain.generate(prompts, params))
    assert recorder.proposals
    assert_as_reference(CASES["full"], model, recorder)
