"""Comparing two runs token for token, with the one excuse there is: a tie that is proven."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.engine.ties import TIE_TOLERANCE
from outrider.sampling import SamplingParams


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [continuation.token_ids for output in outputs for continuation in output.outputs]


def assert_same_or_tied(
    engine: Engine, prompts: Sequence[Sequence[int]], left: list[list[int]], right: list[list[int]]
) -> int:
    """Greedy runs are equal up to proven ties. Returns how many sequences part at one."""
    ties = 0
    assert len(prompts) == len(left) == len(right)
    for prompt, one, other in zip(prompts, left, right, strict=True):
        if one == other:
            continue
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        assert place < min(len(one), len(other)), f"one run ends at token {place}, the other goes on"
        best = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
        common = [*prompt, *one[:place]]
        top = LLM.over(engine).generate({"prompt_token_ids": common}, best)[0].outputs[0].logprobs
        assert top is not None
        (first, first_logprob), (second, second_logprob) = top[0].top
        gap = first_logprob - second_logprob
        assert {one[place], other[place]} == {first, second}, f"token {place}: the best two are {first} and {second}"
        assert gap < TIE_TOLERANCE, f"token {place}: {first} and {second} are {gap} apart"
        ties += 1
    return ties


def reference_logits(model: torch.nn.Module, tokens: Sequence[int], *, last: int = 0) -> torch.Tensor:
    """What Transformers says after each token, or after so many of the last ones."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)]), logits_to_keep=last).logits[0].float()
    assert isinstance(logits, torch.Tensor)
    return logits


def assert_greedy_by_reference(model: torch.nn.Module, prompt: Sequence[int], generated: Sequence[int]) -> int:
    """Every token is the one that the reference prefers after the tokens before it, or ties with it.

    By induction the reference's own greedy text is then the same up to the first tie. Returns the number of ties.
    """
    logits = reference_logits(model, [*prompt, *generated], last=len(generated) + 1)
    ties = 0
    for place, token in enumerate(generated):
        row = logits[place]
        best = int(row.argmax())
        if token != best:
            gap = float(row[best] - row[token])
            assert gap < TIE_TOLERANCE, f"token {place} is {token}, the reference says {best}, {gap} apart"
            ties += 1
    return ties
