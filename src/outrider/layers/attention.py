"""What attention over pages is told: the rows of a batch, the pages they read, and the layer's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionLayer:
    """What one layer's attention is, apart from its projections."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotary: Tensor
    """[positions, rotary_dim]: cosines, then sines."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedKV:
    """One layer's keys and values in an arena: strided views, since a page holds all layers of its group."""

    keys: Tensor
    """[pages, kv_heads, page_tokens, head_dim]"""
    values: Tensor

    @property
    def page_tokens(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionRows:
    """The rows of one step in one group. A row may be a prompt's, a decode's, a draft's or a tap row.

    Row r belongs to line `sequence[r]` of `tables`. It writes its key and value to slot `slots[r]` (page *
    page_tokens + offset; the sink for rows that must not be kept), then reads keys at positions
    [first_key[r], stop_key[r]) through that line. Every row is written before any row reads.
    """

    positions: Tensor
    """int64 [rows]"""
    slots: Tensor
    """int64 [rows]"""
    sequence: Tensor
    """int64 [rows]"""
    tables: Tensor
    """int32 [lines, pages]: the page that holds positions [i * page_tokens, (i + 1) * page_tokens)"""
    first_key: Tensor
    """int64 [rows]"""
    stop_key: Tensor
    """int64 [rows]"""
    most_keys: int
    """No row reads more keys than this."""

    def renew(self, most_keys: int) -> None:
        """The tensors have been filled with the numbers of another step."""
        object.__setattr__(self, "most_keys", most_keys)
