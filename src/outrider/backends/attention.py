"""The arguments of attention over pages: a layer's settings, its pages, and the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionLayer:
    """The settings of one layer's attention, apart from its projections."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotary: Tensor
    """[positions, rotary_dim]: each row has the cosines of a position, then its sines."""
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
class AttentionMetadata:
    """The rows of one batch in one KV group. A row may be a prompt's, a decode's, a draft's or a tap row.

    Row r writes its key and value to slot `slot_mapping[r]` (page * page_tokens + offset; a slot of the null page for
    rows that must not be kept), then reads the keys at positions [first_key[r], stop_key[r]) through row
    `table_rows[r]` of the block tables. Every row is written before any row reads.

    Span s, the consecutive rows of one request, is made of rows [query_start_loc[s], query_start_loc[s + 1]) and ends
    at position seq_lens[s].
    """

    positions: Tensor
    """int64 [rows]"""
    slot_mapping: Tensor
    """int64 [rows]"""
    table_rows: Tensor
    """int64 [rows]"""
    block_tables: Tensor
    """int32 [table rows, pages]: the page that holds positions [i * page_tokens, (i + 1) * page_tokens)"""
    query_start_loc: Tensor
    """int64 [spans + 1]"""
    seq_lens: Tensor
    """int64 [spans]"""
    first_key: Tensor
    """int64 [rows]"""
    stop_key: Tensor
    """int64 [rows]"""
    max_keys: int
    """An upper bound on the number of keys that any row reads."""
