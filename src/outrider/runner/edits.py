"""Edits of logits before temperature: masks, min_tokens, logit_bias and the three penalties.

Each kind of edit is applied to all of its rows at once. The loops below only collect row numbers and token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.runner.request_sampling import SampleRow

# Factors beyond these would take a logit of ordinary size out of the range of float32.
MILDEST, HARSHEST = 1e-30, 1e30


def edit(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Changes `logits` (float32 [rows, vocab]) in place."""
    _forbid(logits, [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None])
    _forbid(logits, [(i, row.state.allowed) for i, row in enumerate(rows) if row.state.allowed is not None])
    suppressed = [(i, token) for i, row in enumerate(rows) if row.suppresses for token in row.state.suppressed]
    if suppressed:
        logits[_index(suppressed, logits.device)] = -torch.inf
    biased = [(i, token, value) for i, row in enumerate(rows) for token, value in row.state.bias]
    if biased:
        where = _index([(i, token) for i, token, _ in biased], logits.device)
        logits[where] += torch.tensor([value for *_, value in biased], dtype=torch.float32, device=logits.device)
    _penalise(logits, rows)


def _forbid(logits: Tensor, masks: list[tuple[int, Tensor]]) -> None:
    if masks:
        where = torch.tensor([i for i, _ in masks], device=logits.device)
        logits[where] = logits[where].masked_fill_(~torch.stack([mask for _, mask in masks]), -torch.inf)


def _penalise(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies penalties to the tokens that they concern: those of the prompt and the output."""
    tokens, counts, numbers, lengths, factors = [], [], [], [], []
    for i, row in enumerate(rows):
        if row.state.history is not None:
            own, often = row.state.history.after(row.assumed)
            tokens.append(own)
            counts.append(often)
            numbers.append(i)
            lengths.append(len(own))
            params = row.state.params
            factor = min(max(params.repetition_penalty, MILDEST), HARSHEST)
            factors.append((factor, params.frequency_penalty, params.presence_penalty))
    if not numbers:
        return
    where = torch.from_numpy(np.stack([np.repeat(numbers, lengths), np.concatenate(tokens)])).to(logits.device)
    count = torch.from_numpy(np.concatenate(counts)).to(logits.device)
    repeated = np.repeat(np.array(factors, dtype=np.float32), lengths, axis=0)
    repetition, frequency, presence = torch.from_numpy(repeated).to(logits.device).unbind(dim=-1)
    x = logits[where[0], where[1]]
    x = torch.where(x > 0, x / repetition, x * repetition)
    # An overflow upwards would look like a broken model; downwards it only means "impossible".
    x = x.clamp_(max=torch.finfo(torch.float32).max) - frequency * count - presence * (count > 0)
    logits[where[0], where[1]] = x


def _index(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=torch.int64, device=device)
    return both[:, 0], both[:, 1]
