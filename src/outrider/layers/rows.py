"""Spans of tokens that run together in one forward pass, and the rows they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from outrider.layers.attention import AttentionRows


class Span(NamedTuple):
    """Consecutive rows of one request: tokens at positions [start, start + len(tokens))."""

    line: int
    """Its line in the page tables."""
    start: int
    tokens: Sequence[int]
    kept_from: int
    """K/V of positions below it goes to the sink."""
    sees_to: int = 0
    """In groups that are not causal every row reads up to here: a block that attends both ways."""
    anchored: bool = False
    """Windows are measured from the first row, for all rows."""


class Rows(NamedTuple):
    """Good until as many rows are asked for again: their memory may be used for those."""

    tokens: Tensor
    """int64 [rows], where the model runs"""
    groups: tuple[AttentionRows, ...]
    """In the order of the groups asked for."""
    first_row: list[int]
    """Per span: where its rows begin."""
    kept: bool = False
    """These very objects come back with other numbers in them: what is made of them is worth keeping."""


class RowBuilder(Protocol):
    def rows(self, spans: Sequence[Span], groups: range, *, beside: bool = False) -> Rows:
        """`beside`: in other memory than without, so that both can be in use."""
