"""Log-probabilities of tokens under the raw distribution, before any setting of the request changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Bounds the memory for a long prompt."""


class TokenLogprobs(NamedTuple):
    """How likely one token was, and which were the most likely ones."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token; equal ones are ranked by id."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first; as many as were asked for."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of `logits` (float32): its token, with `counts` alternatives.

    For prompt log-probabilities the rows are those of positions [0, T - 1) and the tokens those of [1, T).
    """
    assert len(tokens) == len(counts) == logits.shape[0]
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        found += _few(logits[start:end], tokens[start:end], counts[start:end])
    return found


def _few(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    level = logits.gather(-1, chosen)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    # By logits, not log-probabilities: rounding makes some of those equal.
    better = (logits > level) | ((logits == level) & (ids < chosen))
    ranks = (better.sum(dim=-1) + 1).tolist()
    own = logprobs.gather(-1, chosen)[:, 0].tolist()
    width = min(max(counts), logits.shape[-1])
    best = _ranking(logits, ids).topk(width, dim=-1).indices
    best_ids, best_logprobs = best.tolist(), logprobs.gather(-1, best).tolist()
    return [
        TokenLogprobs(token, own[i], ranks[i], tuple(zip(best_ids[i][:count], best_logprobs[i][:count], strict=True)))
        for i, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]


def _ranking(logits: Tensor, ids: Tensor) -> Tensor:
    """int64 that order tokens by logit and equal ones by id, all different: `topk` alone leaves ties open."""
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0 and 0 are equal but differ in their bits
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) - ids
