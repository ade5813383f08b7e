"""What changes logits before temperature: masks, min_tokens, logit_bias and the three penalties.

Each kind is applied to all rows that want it at once. The loops below only collect row numbers and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.runner.request_sampling import SampleRow

# Beyond these a logit of ordinary size would leave the range of float32.
MILDEST, HARSHEST = 1e-30, 1e30


def edit(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Change `logits` ([rows, vocab], float32) in place."""
    _forbid(logits, [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None])
    _forbid(logits, [(i, row.state.allowed) for i, row in enumerate(rows) if row.state.allowed is not None])
    suppressed = [(i, token) for i, row in enumerate(rows) if row.suppresses for token in row.state.suppressed]
    if suppressed:
        logits[_index(suppressed, logits.device)] = -torch.inf
    biased = [(i, token, value) for i, row in enumerate(rows) for token, value in row.state.bias]
    if biased:
        where = _index([(i, token) for i, token, _ in biased], logits.device)
        logits[where] += _column([value for *_, value in biased], logits.device)
    _on_rows(logits, rows, lambda row: row.state.seen is not None, _repetition)
    _on_rows(logits, rows, lambda row: row.state.counts is not None, _frequency_and_presence)


def _forbid(logits: Tensor, masks: list[tuple[int, Tensor]]) -> None:
    if masks:
        where = torch.tensor([i for i, _ in masks], device=logits.device)
        logits[where] = logits[where].masked_fill_(~torch.stack([mask for _, mask in masks]), -torch.inf)


def _on_rows(
    logits: Tensor,
    rows: Sequence[SampleRow],
    wanted: Callable[[SampleRow], bool],
    change: Callable[[Tensor, list[SampleRow]], Tensor],
) -> None:
    chosen = [i for i, row in enumerate(rows) if wanted(row)]
    if chosen:
        where = torch.tensor(chosen, device=logits.device)
        logits[where] = change(logits[where], [rows[i] for i in chosen])


def _repetition(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    seen = torch.stack([row.state.seen for row in rows if row.state.seen is not None])
    assumed = [(i, token) for i, row in enumerate(rows) for token in row.assumed]
    if assumed:
        seen[_index(assumed, logits.device)] = True
    factors = [min(max(row.state.params.repetition_penalty, MILDEST), HARSHEST) for row in rows]
    factor = _column(factors, logits.device)[:, None]
    # An overflow upwards would look like a broken model; downwards it only means "impossible".
    penalised = torch.where(logits > 0, logits / factor, logits * factor).clamp_(max=torch.finfo(torch.float32).max)
    return torch.where(seen, penalised, logits)


def _frequency_and_presence(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    counts = torch.stack([row.state.counts for row in rows if row.state.counts is not None])
    assumed = [(i, token) for i, row in enumerate(rows) for token in row.assumed]
    if assumed:
        # Accumulates: one token may be assumed twice. Sums of small whole numbers are exact in any order.
        one = torch.ones((), device=logits.device)
        counts.index_put_(_index(assumed, logits.device), one, accumulate=True)
    frequency = _column([row.state.params.frequency_penalty for row in rows], logits.device)[:, None]
    presence = _column([row.state.params.presence_penalty for row in rows], logits.device)[:, None]
    return logits - frequency * counts - presence * (counts > 0)


def _index(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=torch.int64, device=device)
    return both[:, 0], both[:, 1]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
