"""Decides whether two runs that should be equal differ at a token because of a tie, or because one of them is wrong.

The order in which a batch sums up its products may change a logit in its last bits. Where the two best candidates
are closer than that, either choice is right. The logits are computed once more, from the tokens before, and the
candidates must be that close to the best: anything else is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.backends.keyed_noise import fork_seed, row_key
from outrider.backends.reference.noise import gumbel
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.sampling import SamplingParams

TIE_TOLERANCE = 1e-3
"""Largest difference of tied logits in float32; sums of a thousand products differ by some 1e-5."""
TIE_ULPS = 32
"""Largest difference in shorter formats, in units of their epsilon: logits between 16 and 32 are rounded to 16 of
them, and two such steps are allowed."""


def tie_tolerance(dtype: torch.dtype) -> float:
    return max(TIE_TOLERANCE, TIE_ULPS * torch.finfo(dtype).eps)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first place at which two texts differ; None if they are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """Two candidates for one token, and how they compare when the logits are computed once more."""

    candidates: tuple[int, int]
    best: int
    """The token that the new logits choose."""
    gap: float
    """How far the worse candidate is behind the best token, in logits or, when sampling, in logits with noise."""
    tolerance: float

    @property
    def tied(self) -> bool:
        return self.gap < self.tolerance


def examine(engine: Engine, before: Sequence[int], candidates: tuple[int, int], params: SamplingParams) -> Parting:
    """Compute the logits after the tokens `before` once more, with nothing taken from the prefix cache.

    `params` are those of the runs, without filters. The engine must be idle.
    """
    assert not engine.has_work
    assert params.greedy or params.seed is not None, "noise without a seed cannot be computed again"
    one = replace(params, max_tokens=1, min_tokens=0, n=1, stop=None, prompt_logprobs=0)
    best = _run(engine, before, one).outputs[0].token_ids[0]
    scores = {token: _score(engine, before, token, one) for token in {best, *candidates}}
    return Parting(
        candidates=candidates,
        best=best,
        gap=max(scores.values()) - min(scores[token] for token in candidates),
        tolerance=tie_tolerance(engine.model.dtype),
    )


def _score(engine: Engine, before: Sequence[int], token: int, params: SamplingParams) -> float:
    """Returns the score that the choice of a token goes by, up to a constant that all tokens share."""
    scored = _run(engine, [*before, token], params).prompt_logprobs
    assert scored is not None and scored[-1] is not None
    logprob = scored[-1].logprob
    if params.greedy:
        return logprob
    assert params.seed is not None
    key = torch.tensor(row_key(fork_seed(params.seed, 0), len(before)))
    return logprob / params.temperature + float(gumbel(key, torch.tensor(token)))


def _run(engine: Engine, tokens: Sequence[int], params: SamplingParams) -> RequestOutput:
    name = "tie-examination"
    engine.add_request(name, tokens, params, speculate=False)
    output = engine.output(name)
    while not output.finished:
        engine.step()
    assert output.error is None, output.error
    return output
