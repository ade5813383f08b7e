"""The memory of the KV cache: one tensor per arena, with views for the groups that share it.

A page of a group holds all of the group's layers:

    [layer][key, value][kv head][slot][head_dim]

so that one page number serves every layer, and the keys of one head in one page lie side by side. Groups that share
an arena have pages of equal bytes and different lengths; the unused bytes of a page are at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from outrider.backends.attention import PagedKV
from outrider.backends.base import Backend
from outrider.errors import ConfigError
from outrider.kv.intervals import Interval, pages_under
from outrider.kv.layout import KVLayout
from outrider.kv.plan import PageCopy
from outrider.models.kv_groups import LayerGroups
from outrider.transfer.links.memory import ArenaMemory, GroupMemory, MemoryMap


class PageStore:
    def __init__(
        self,
        layout: KVLayout,
        arena_pages: tuple[int, ...],
        owners: tuple[LayerGroups, ...],
        *,
        dtype: torch.dtype,
        backend: Backend,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`owners`: the target, then the drafter if it has groups, in the layout's order. `settle` waits until the last
        step has written all that it writes."""
        self._settle = settle
        self.exposed = False
        """Whether pages are read and written by more than the backend."""
        self._arenas = [
            _arena(pages, page_bytes // dtype.itemsize, dtype=dtype, backend=backend)
            for pages, page_bytes in zip(arena_pages, layout.arena_page_bytes, strict=True)
        ]
        self._groups: list[Tensor] = []
        """The pages of each group: [pages, layers, 2, kv_heads, page_tokens, head_dim]."""
        self._arena_of = layout.arena_of
        for owner in owners:
            for spec, layers in zip(owner.specs, owner.layers_in, strict=True):
                arena = self._arenas[layout.arena_of[len(self._groups)]]
                shape = (layers, 2, owner.kv_heads, spec.page_tokens, owner.head_dim)
                self._groups.append(arena[:, : prod(shape)].view(arena.shape[0], *shape))

    def layers(self, owner: LayerGroups, first_group: int) -> tuple[PagedKV, ...]:
        """Returns each layer's keys and values, for a decoder whose groups start at `first_group`."""
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
        """Returns a page's content, for a checksum."""
        self._settle()
        tensor = self._groups[group][page].contiguous().cpu()
        return tensor.view(torch.uint8).numpy().tobytes()

    def slots_digest(self, group: int, pages: Sequence[int], interval: Interval) -> bytes:
        """Returns a digest of slots in the order of their positions: two workers with other page sizes, and other
        pages, get the same one. `pages` is indexed by page number."""
        self._settle()
        hasher = blake2b(digest_size=16)
        size = self._groups[group].shape[-2]
        for number in pages_under(interval, size):
            first, stop = max(0, interval.start - number * size), min(size, interval.end - number * size)
            slots = self._groups[group][pages[number], ..., first:stop, :].movedim(-2, 0).contiguous().cpu()
            hasher.update(slots.view(torch.uint8).numpy().tobytes())
        return hasher.digest()

    @property
    def is_in_host_memory(self) -> bool:
        """Whether this process can address the pages."""
        return all(arena.device.type == "cpu" for arena in self._arenas)

    def memory_map(self) -> MemoryMap:
        """Returns where the pages lie in this process, for a link or a tier that copies them."""
        if not self.is_in_host_memory:
            raise ConfigError(
                "kv_transfer_config: KV in a GPU's memory cannot be handed over yet; use --device cpu, or leave "
                "kv_transfer_config out"
            )
        self.exposed = True
        arenas = [
            ArenaMemory(
                base=arena.data_ptr(), page_bytes=arena.shape[1] * arena.element_size(), num_pages=arena.shape[0]
            )
            for arena in self._arenas
        ]
        groups = []
        for group, pages in enumerate(self._groups):
            _pages, layers, two, heads, page_tokens, head_dim = pages.shape
            groups.append(
                GroupMemory(
                    arena=self._arena_of[group],
                    planes=layers * two * heads,
                    page_tokens=page_tokens,
                    plane_slot_bytes=head_dim * pages.element_size(),
                )
            )
        return MemoryMap(arenas=arenas, groups=groups)

    @property
    def total_bytes(self) -> int:
        return sum(arena.numel() * arena.element_size() for arena in self._arenas)


def _arena(pages: int, page_items: int, *, dtype: torch.dtype, backend: Backend) -> Tensor:
    """Returns zeroed pages. The reference backend gathers slots past a row's last key and masks them, and NaN times 0
    is NaN."""
    try:
        return backend.zeros((pages, page_items), dtype)
    except (OSError, torch.OutOfMemoryError):
        raise ConfigError(
            f"{pages:,} pages of {page_items * dtype.itemsize:,} bytes for KV are more than {backend.device} has left; "
            "lower kv_cache_memory_bytes, or gpu_memory_utilization on a GPU"
        ) from None
