"""One token for each row of logits: temperature, min_p, top_k, top_p, then the Gumbel-max draw.

`draw` is the reference, in plain tensor operations for any device; `draw_compiled` (CPU) and `draw_fused` (CUDA)
give the same tokens faster. Tokens are ranked by logit, equal ones by id, and each filter keeps a beginning of
that ranking:

    y      = (logit - largest logit) / temperature
    min_p    y >= log(min_p)
    top_k    rank < top_k
    top_p    the weights exp(y) of all better tokens that min_p and top_k keep sum to less than top_p of them all
    draw     argmax of y + noise(row key, token); equal sums: the lowest id

Weights are whole numbers (`WEIGHT_BITS` binary places), so a sum is exact: it does not depend on the order of
its terms, and so neither on the batch nor on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.runner.noise import gumbel, weight


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawSettings:
    """One entry for each row, all on the device of the logits."""

    temperature: Tensor
    """float64, above 0"""
    log_min_p: Tensor
    """float64; -inf keeps all"""
    top_k: Tensor
    """int64; 0 keeps all"""
    top_p: Tensor
    """float64; 1 keeps all"""
    key: Tensor
    """int64, from `row_key`"""
    filters: bool
    """Does any row use top_k or top_p?"""


def draw(logits: Tensor, settings: DrawSettings) -> Tensor:
    """[rows] token ids. Each row of `logits` (float32) must have a finite maximum and no NaN."""
    y = _scaled(logits, settings)
    y = y.masked_fill(y < settings.log_min_p[:, None], -torch.inf)
    if settings.filters:
        y = y.masked_fill(~_kept(logits, y, settings.top_k[:, None], settings.top_p[:, None]), -torch.inf)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return (y + gumbel(settings.key[:, None], tokens)).argmax(dim=-1)


def _scaled(logits: Tensor, settings: DrawSettings) -> Tensor:
    wide = logits.to(torch.float64)
    return (wide - wide.amax(dim=-1, keepdim=True)) / settings.temperature[:, None]


def draw_fused(logits: Tensor, settings: DrawSettings) -> Tensor:
    """The same on CUDA in fewer kernels; filters as above."""
    # Imported where it is used: machines without a GPU need not have it.
    from outrider.kernels.draw_triton import pick

    kept = None
    if settings.filters:
        y = _scaled(logits, settings)
        y = y.masked_fill(y < settings.log_min_p[:, None], -torch.inf)
        kept = _kept(logits, y, settings.top_k[:, None], settings.top_p[:, None])
    top = logits.amax(dim=-1)
    return pick(logits, top, settings.temperature, settings.log_min_p, settings.key, kept)


def draw_compiled(logits: Tensor, settings: DrawSettings) -> Tensor:
    """The same on the CPU."""
    # Imported where it is used, because it is compiled when it is first imported.
    from outrider.kernels.draw_cpu import draw_cpu

    names = ("temperature", "log_min_p", "top_k", "top_p", "key")
    arrays = {name: getattr(settings, name).numpy() for name in names}
    return torch.from_numpy(draw_cpu(logits.numpy(), **arrays))


def _kept(logits: Tensor, y: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens top_k and top_p keep."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(logits.shape[-1], device=logits.device)
    in_top_k = (rank < top_k) | (top_k == 0)
    weights = weight(y.gather(-1, order)) * in_top_k
    running = weights.cumsum(dim=-1)
    limit = torch.ceil(running[:, -1:].to(torch.float64) * top_p).to(torch.int64)
    kept = in_top_k & ((running - weights < limit) | (top_p == 1.0))
    return torch.zeros_like(kept).scatter(-1, order, kept)
