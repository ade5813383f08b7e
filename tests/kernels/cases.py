"""Random input for kernels, and how near a fast result must be to the plain one."""

import torch
from torch import Tensor

from outrider.layers.attention import AttentionLayer, AttentionRows, PagedKV
from outrider.layers.rope import rotary_table
from outrider.models.spec import RopeSpec


def near(fast: Tensor, plain: Tensor, tolerance: float = 2e-5) -> bool:
    """Relative to the largest element: sums that cancel have no smaller error than their terms."""
    assert fast.shape == plain.shape
    assert torch.isfinite(fast).all()
    return bool((fast.float() - plain.float()).abs().max() <= tolerance * plain.float().abs().max())


def layer(
    generator: torch.Generator,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 32,
    rotary_dim: int | None = None,
    head_norms: bool = False,
    softcap: float | None = None,
    sinks: bool = False,
) -> AttentionLayer:
    rope = RopeSpec(rotary_dim=dim if rotary_dim is None else rotary_dim)
    return AttentionLayer(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        rotary=rotary_table(rope, 2048, dtype=torch.float32, device=torch.device("cpu")),
        q_norm=torch.rand(dim, generator=generator) + 0.5 if head_norms else None,
        k_norm=torch.rand(dim, generator=generator) + 0.5 if head_norms else None,
        norm_eps=1e-5,
        softcap=softcap,
        sinks=torch.randn(heads, generator=generator) if sinks else None,
    )


def pages(
    generator: torch.Generator, layer: AttentionLayer, *, pages: int, page_tokens: int, dtype: torch.dtype
) -> PagedKV:
    """A strided view of an arena that holds two layers."""
    shape = (pages, 2, 2, layer.kv_heads, page_tokens, layer.head_dim)
    arena = torch.randn(shape, generator=generator).to(dtype)
    return PagedKV(keys=arena[:, 1, 0], values=arena[:, 1, 1])


def copied(kv: PagedKV) -> PagedKV:
    return PagedKV(keys=kv.keys.clone(), values=kv.values.clone())


def rows(
    generator: torch.Generator,
    ranges: list[tuple[int, int, int, int]],
    *,
    page_tokens: int,
    page_count: int,
) -> AttentionRows:
    """From (line, position, first_key, stop_key) of each row. Lines get pages of their own, in random order."""
    lines = 1 + max(line for line, *_ in ranges)
    width = 1 + max(max(position, stop - 1) for _, position, _, stop in ranges) // page_tokens
    assert lines * width <= page_count
    tables = torch.randperm(page_count, generator=generator)[: lines * width].reshape(lines, width).int()
    slots = [
        int(tables[line, position // page_tokens]) * page_tokens + position % page_tokens
        for line, position, _, _ in ranges
    ]
    return AttentionRows(
        positions=torch.tensor([position for _, position, _, _ in ranges]),
        slots=torch.tensor(slots),
        sequence=torch.tensor([line for line, *_ in ranges], dtype=torch.int32),
        tables=tables,
        first_key=torch.tensor([first for _, _, first, _ in ranges], dtype=torch.int32),
        stop_key=torch.tensor([stop for *_, stop in ranges], dtype=torch.int32),
        most_keys=max(stop - first for _, _, first, stop in ranges),
    )


def chosen(rows: AttentionRows, which: list[int]) -> AttentionRows:
    """Some of the rows."""
    stop, first = rows.stop_key[which], rows.first_key[which]
    return AttentionRows(
        positions=rows.positions[which],
        slots=rows.slots[which],
        sequence=rows.sequence[which],
        tables=rows.tables,
        first_key=first,
        stop_key=stop,
        most_keys=int((stop - first).max()),
    )
