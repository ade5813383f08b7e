"""Which KV groups a decoder's layers fall into, and where in its group each layer lies. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kv.footprint import GroupSpec
from outrider.kv.groups import Full, Sliding
from outrider.models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroups:
    """Groups of one decoder. Layers of equal window share one page table."""

    specs: tuple[GroupSpec, ...]
    place: tuple[tuple[int, int], ...]
    """Per layer: its group among `specs`, and its place inside a page of that group."""
    layers_in: tuple[int, ...]
    """Per group: how many layers it has."""
    kv_heads: int
    head_dim: int


def layer_groups(spec: DecoderSpec, *, owner: str, page_tokens: int, item_bytes: int) -> LayerGroups:
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
    specs = tuple(
        GroupSpec(
            name=f"{owner}.full" if window is None else f"{owner}.window{window}",
            kind=Full() if window is None else Sliding(window),
            page_tokens=page_tokens,
            slot_bytes=count * layer_bytes,
        )
        for window, count in zip(windows, counts, strict=True)
    )
    return LayerGroups(
        specs=specs,
        place=tuple(place),
        layers_in=tuple(counts),
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
    )
