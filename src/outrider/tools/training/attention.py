"""Attention of draft blocks over a stream: each block sees the context before its anchor, and itself.

    keys      │ context 0 … S-1 │ block 0 │ block 1 │ … │
    block b   │ < anchor of b   │         │  itself │   │

Two ways to compute it: `flex` skips tiles that no row sees and is fast on a GPU only; `sdpa` takes the whole mask and
runs anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

TILE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    length: int
    """Number of context positions."""
    anchors: int
    block_size: int
    causal: bool

    @property
    def rows(self) -> int:
        return self.anchors * self.block_size

    @property
    def keys(self) -> int:
        return self.length + self.rows


def dense_mask(layout: BlockLayout, anchors: Tensor) -> Tensor:
    """Returns [streams, 1, rows, keys], true where a row sees a key."""
    row = torch.arange(layout.rows, device=anchors.device)
    position = torch.arange(layout.length, device=anchors.device)
    context = position < anchors.repeat_interleave(layout.block_size, dim=1)[..., None]
    own = row[:, None] // layout.block_size == row[None, :] // layout.block_size
    if layout.causal:
        own = own & (row[None, :] <= row[:, None])
    return torch.cat([context, own.expand(len(anchors), -1, -1)], dim=-1)[:, None]


class BlockMasks:
    """Makes the mask of each step; the mask function reads one buffer of anchors, so it is compiled only once."""

    def __init__(self, layout: BlockLayout, streams: int, device: torch.device, *, flex: bool) -> None:
        self.layout = layout
        self.flex = flex
        self.anchors = torch.zeros(streams, layout.anchors, dtype=torch.int32, device=device)
        buffer, length, size, causal = self.anchors, layout.length, layout.block_size, layout.causal

        def sees(b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            block = q // size
            own = (kv >= length) & ((kv - length) // size == block)
            if causal:
                own = own & (kv - length <= q)
            return ((kv < length) & (kv < buffer[b, block])) | own

        self._sees = sees

    def make(self, anchors: Tensor) -> Tensor | BlockMask:
        if not self.flex:
            return dense_mask(self.layout, anchors)
        self.anchors.copy_(anchors)
        layout = self.layout
        if layout.length % TILE or layout.rows % TILE or TILE % layout.block_size:
            return create_block_mask(
                self._sees, len(anchors), None, layout.rows, layout.keys, device=str(anchors.device)
            )
        return self._tiled(anchors)

    def _tiled(self, anchors: Tensor) -> BlockMask:
        """Derives the tiles that are seen in part or whole from the first and last anchor of each tile of rows."""
        layout = self.layout
        tiles = anchors.unflatten(1, (-1, TILE // layout.block_size))
        lowest, highest = tiles.amin(-1)[..., None], tiles.amax(-1)[..., None]
        start = torch.arange(0, layout.length, TILE, device=anchors.device)
        whole = start + TILE <= lowest
        partial = (start < highest) & ~whole
        own = torch.eye(layout.rows // TILE, dtype=torch.bool, device=anchors.device).expand(len(anchors), -1, -1)
        partial = torch.cat([partial, own], dim=-1)[:, None]
        whole = torch.cat([whole, torch.zeros_like(own)], dim=-1)[:, None]
        return BlockMask.from_kv_blocks(
            *_tile_list(partial),
            *_tile_list(whole),
            BLOCK_SIZE=TILE,
            mask_mod=self._sees,
            seq_lengths=(layout.rows, layout.keys),
        )


def _tile_list(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of tiles that each tile of rows needs, and all tile numbers with the needed ones first."""
    order = seen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Maps q [streams, rows, heads, dim] and k, v [streams, keys, kv_heads, dim] to [streams, rows, heads * dim]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
    else:
        # With a mask, the fused kernels do not support grouped queries.
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def rotate_rows(x: Tensor, table: Tensor) -> Tensor:
    """Applies rotary embeddings: x is [..., rows, heads, dim], table [..., rows, rotary]."""
    half = table.shape[-1] // 2
    cos, sin = table[..., None, :half], table[..., None, half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)
