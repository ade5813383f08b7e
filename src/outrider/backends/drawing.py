"""The settings of a draw, one entry for each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawSettings:
    """Tensors with one entry for each row, on the device of the logits."""

    temperature: Tensor
    """float64, above 0"""
    log_min_p: Tensor
    """float64; -inf keeps all tokens"""
    top_k: Tensor
    """int64; 0 keeps all tokens"""
    top_p: Tensor
    """float64; 1 keeps all tokens"""
    key: Tensor
    """int64, from `keyed_noise.row_key`"""
    filters: bool
    """Whether any row uses top_k or top_p."""
