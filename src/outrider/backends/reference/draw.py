"""One token for each row of logits: temperature, min_p, top_k, top_p, then the Gumbel-max draw.

`draw` is the reference, in plain tensor operations for any device; other backends give the same tokens faster.
Tokens are ranked by logit, equal logits by id, and each filter keeps a prefix of that ranking:

    y      = (logit - largest logit) / temperature
    min_p    y >= log(min_p)
    top_k    rank < top_k
    top_p    the weights exp(y) of all better tokens that min_p and top_k keep sum to less than top_p of them all
    draw     argmax of y + noise(row key, token); the lowest id among equal sums

Weights are integers (`WEIGHT_BITS` binary places), so a sum is exact: it does not depend on the order of its terms, and
therefore neither on the batch nor on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.backends.drawing import DrawSettings
from outrider.backends.reference.noise import gumbel, weight


def draw(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Returns [rows] token ids. Each row of `logits` (float32) must have a finite maximum and no NaN."""
    y = _scaled(logits, settings)
    y = y.masked_fill(y < settings.log_min_p[:, None], -torch.inf)
    if settings.filters:
        y = y.masked_fill(~_kept(logits, y, settings), -torch.inf)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return (y + gumbel(settings.key[:, None], tokens)).argmax(dim=-1)


def _scaled(logits: Tensor, settings: DrawSettings) -> Tensor:
    wide = logits.to(torch.float64)
    return (wide - wide.amax(dim=-1, keepdim=True)) / settings.temperature[:, None]


def kept_tokens(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Returns which tokens min_p, top_k and top_p keep: bool [rows, vocabulary]."""
    y = _scaled(logits, settings)
    return _kept(logits, y.masked_fill(y < settings.log_min_p[:, None], -torch.inf), settings)


def _kept(logits: Tensor, y: Tensor, settings: DrawSettings) -> Tensor:
    """Returns which tokens top_k and top_p keep."""
    top_k, top_p = settings.top_k[:, None], settings.top_p[:, None]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(logits.shape[-1], device=logits.device)
    in_top_k = (rank < top_k) | (top_k == 0)
    weights = weight(y.gather(-1, order)) * in_top_k
    running = weights.cumsum(dim=-1)
    limit = torch.ceil(running[:, -1:].to(torch.float64) * top_p).to(torch.int64)
    kept = in_top_k & ((running - weights < limit) | (top_p == 1.0))
    return torch.zeros_like(kept).scatter(-1, order, kept)
