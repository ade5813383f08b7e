"""Log-probabilities of tokens under the raw distribution, before any setting of the request changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Number of rows that are processed at once, which bounds the memory for a long prompt."""


class TokenLogprobs(NamedTuple):
    """The log-probability of one token, and the most likely tokens at its position."""

    token: int
    logprob: float
    rank: int
    """The rank of the token: 1 for the most likely one. Equally likely tokens are ranked by id."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, as many as the request asked for."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of each row's token and of `counts` alternatives, from float32 logits.

    For prompt log-probabilities the rows are those of positions [0, T - 1) and the tokens those of [1, T).
    """
    assert len(tokens) == len(counts) == logits.shape[0]
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        some = logits[start:end]
        width = min(max(counts[start:end]), logits.shape[-1])
        rank = ranks_on_cpu if some.device.type == "cpu" else ranks
        chosen = torch.tensor(tokens[start:end], device=logits.device)[:, None]
        own, best = rank(some, chosen, width)
        logprobs = some.log_softmax(dim=-1)
        columns = zip(
            tokens[start:end],
            logprobs.gather(-1, chosen)[:, 0].tolist(),
            own.tolist(),
            best.tolist(),
            logprobs.gather(-1, best).tolist(),
            counts[start:end],
            strict=True,
        )
        for token, logprob, place, ids, values, count in columns:
            top = tuple(zip(ids[:count], values[:count], strict=True))
            found.append(TokenLogprobs(token, logprob, place, top))
    return found


def ranks(logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the ranks of the chosen tokens and the `width` best tokens: [rows], [rows, width].

    Tokens are ranked by logits: rounding makes some log-probabilities equal.
    """
    level = logits.gather(-1, chosen)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    better = (logits > level) | ((logits == level) & (ids < chosen))
    return better.sum(dim=-1) + 1, _ranking(logits, ids).topk(width, dim=-1).indices


def ranks_on_cpu(logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the same as `ranks`, without 64-bit copies of all logits."""
    own = torch.empty(len(logits), dtype=torch.int64)
    best = torch.empty(len(logits), width, dtype=torch.int64)
    for i, (row, token) in enumerate(zip(logits.numpy(), chosen[:, 0].tolist(), strict=True)):
        own[i] = 1 + int(np.count_nonzero(row > row[token])) + int(np.count_nonzero(row[:token] == row[token]))
        if width:
            last = np.partition(row, -width)[-width]
            candidates = np.flatnonzero(row >= last)  # in the order of their ids, which a stable sort keeps
            order = np.argsort(-row[candidates], kind="stable")[:width]
            best[i] = torch.from_numpy(candidates[order])
    return own, best


def _ranking(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns distinct int64 numbers that order tokens by logit and then by id: `topk` alone leaves ties open."""
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0 and 0 are equal but differ in their bits
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) - ids
