"""The KV groups of a decoder's layers, the sizes of their pages, and the place of each layer in its group.

Layers of equal window share one block table. Where a decoder has several such groups, their pages are given equal
bytes by giving them different lengths, so that one arena serves all and no memory is set aside for either kind:

    15 layers with a window     page of 16 tokens      15 x 16 = 240 layer-slots
     3 layers without one       page of 80 tokens       3 x 80 = 240 layer-slots

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm

from outrider.kv.footprint import GroupSpec
from outrider.kv.groups import Full, Sliding
from outrider.models.spec import DecoderSpec

MOST_ALIGNED = 8
"""The largest alignment, as a multiple of the shortest page. Windows are kept for hits at multiples of the alignment,
and the tokens after such a hit are computed again."""
MOST_UNUSED = 0.1
"""The largest unused part of a page, where the numbers of layers do not divide each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroups:
    """The KV groups of one decoder."""

    specs: tuple[GroupSpec, ...]
    place: tuple[tuple[int, int], ...]
    """For each layer, the index of its group in `specs` and its place inside a page of that group."""
    layers_in: tuple[int, ...]
    """Number of layers in each group."""
    kv_heads: int
    head_dim: int


def layer_groups(
    spec: DecoderSpec, *, owner: str, page_tokens: int, item_bytes: int, one_arena: bool = False
) -> LayerGroups:
    """Returns the KV groups of a decoder. `page_tokens` is the length of a page; with `one_arena`, that of the shortest
    page."""
    windows: list[int | None] = []
    counts: list[int] = []
    place: list[tuple[int, int]] = []
    for layer in spec.layers:
        if layer.window not in windows:
            windows.append(layer.window)
            counts.append(0)
        group = windows.index(layer.window)
        place.append((group, counts[group]))
        counts[group] += 1
    layer_bytes = 2 * spec.kv_size * item_bytes
    lengths = [page_tokens] * len(counts)
    if one_arena:
        lengths = [page_tokens * blocks for blocks in blocks_per_page(counts)]
    sizes = [count * length * layer_bytes for count, length in zip(counts, lengths, strict=True)]
    shared = one_arena and min(sizes) >= max(sizes) * (1 - MOST_UNUSED)
    specs = tuple(
        GroupSpec(
            name=f"{owner}.full" if window is None else f"{owner}.window{window}",
            kind=Full() if window is None else Sliding(window),
            page_tokens=length,
            slot_bytes=count * layer_bytes,
            unused_bytes=max(sizes) - size if shared else 0,
        )
        for window, count, length, size in zip(windows, counts, lengths, sizes, strict=True)
    )
    return LayerGroups(
        specs=specs,
        place=tuple(place),
        layers_in=tuple(counts),
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
    )


def blocks_per_page(layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of blocks of `page_tokens` in a page of each group, so that pages of all groups have about
    equal bytes.

    The group with the most layers gets the fewest blocks: one if that leaves little unused, else two, and so on. If no
    number does, every group gets one block and an arena of its own.
    """
    most = max(layers)
    for fewest in range(1, MOST_ALIGNED):
        # Rounded down, a longer page is not quite filled; rounded up, the shorter ones are not.
        choices = [{most * fewest // count, -(-most * fewest // count)} for count in layers]
        best = min(product(*map(sorted, choices)), key=lambda blocks: (_unused(layers, blocks), sum(blocks)))
        if _unused(layers, best) <= MOST_UNUSED and lcm(*best) <= MOST_ALIGNED * min(best):
            return best
    return (1,) * len(layers)


def _unused(layers: Sequence[int], blocks: Sequence[int]) -> float:
    """Returns the largest unused part of any group's page."""
    sizes = [count * each for count, each in zip(layers, blocks, strict=True)]
    return 1 - min(sizes) / max(sizes)
