"""The bytes of the KV cache: one tensor per arena, seen through the groups that share it.

A page of a group holds all of the group's layers:

    [layer][key, value][kv head][slot][head_dim]

so that one page number serves every layer, and the keys of one head in one page lie side by side. Groups that share
an arena have pages of equal bytes and different lengths; what a group leaves unused is at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.kv.layout import KVLayout
from outrider.kv.plan import PageCopy
from outrider.layers.attention import PagedKV
from outrider.models.kv_groups import LayerGroups
from outrider.models.weights.memory import zeros


class PageStore:
    def __init__(
        self,
        layout: KVLayout,
        arena_pages: tuple[int, ...],
        owners: tuple[LayerGroups, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`owners`: the target, then the drafter if it has groups, in the layout's order."""
        self._arenas = [
            _arena(pages, page_bytes // dtype.itemsize, dtype=dtype, device=device)
            for pages, page_bytes in zip(arena_pages, layout.arena_page_bytes, strict=True)
        ]
        self._layout = layout
        self._groups: list[Tensor] = []
        """Per group: [pages, layers, 2, kv_heads, page_tokens, head_dim]."""
        for owner in owners:
            for spec, layers in zip(owner.specs, owner.layers_in, strict=True):
                arena = self._arenas[layout.arena_of[len(self._groups)]]
                shape = (layers, 2, owner.kv_heads, spec.page_tokens, owner.head_dim)
                self._groups.append(arena[:, : prod(shape)].view(arena.shape[0], *shape))

    def layers(self, owner: LayerGroups, first_group: int) -> tuple[PagedKV, ...]:
        """Each layer's keys and values, for a decoder whose groups start at `first_group`."""
        views = []
        for group, place in owner.place:
            pages = self._groups[first_group + group]
            views.append(PagedKV(keys=pages[:, place, 0], values=pages[:, place, 1]))
        return tuple(views)

    def copy(self, copies: Iterable[PageCopy]) -> None:
        for copy in copies:
            pages = self._groups[copy.group]
            span = slice(copy.first, copy.stop)
            pages[copy.destination, ..., span, :] = pages[copy.source, ..., span, :]

    def page_bytes(self, group: int, page: int) -> bytes:
        """A page's content, for a checksum."""
        tensor = self._groups[group][page].contiguous().cpu()
        return tensor.view(torch.uint8).numpy().tobytes()

    @property
    def total_bytes(self) -> int:
        return sum(arena.numel() * arena.element_size() for arena in self._arenas)


def _arena(pages: int, page_items: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not garbage: what a padded row reads from the sink is masked, but NaN times nothing is NaN."""
    try:
        return zeros((pages, page_items), dtype, device)
    except (OSError, torch.OutOfMemoryError):
        raise ConfigError(
            f"{pages:,} pages of {page_items * dtype.itemsize:,} bytes for KV are more than {device} has left; lower "
            "kv_cache_memory_bytes, or gpu_memory_utilization on a GPU"
        ) from None
