"""Where slots lie in memory: from runs of slots to spans of bytes.

A page of a group is `planes` tables of `page_tokens` slots each (one for each layer, key or value, and head):

    page    [plane 0: slot 0, slot 1, …][plane 1: slot 0, slot 1, …] … [unused]

A run of slots is one span in every plane; a whole page between equal page sizes is a single span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.errors import TransferError
from outrider.kv.intervals import SlotRun

ADDRESS_END = 1 << 63
"""Beyond the memory of every process."""
Addresses = npt.NDArray[np.uint64]


class ArenaMemory(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One pool of pages."""

    base: int
    """Address of page 0 in its process."""
    page_bytes: int
    num_pages: int

    @property
    def total_bytes(self) -> int:
        return self.page_bytes * self.num_pages


class GroupMemory(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """How the pages of one KV group are laid out in their arena."""

    arena: int
    planes: int
    page_tokens: int
    plane_slot_bytes: int
    """Bytes of one slot in one plane."""

    @property
    def plane_bytes(self) -> int:
        return self.page_tokens * self.plane_slot_bytes


class MemoryMap(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """All pages of one worker."""

    arenas: list[ArenaMemory]
    groups: list[GroupMemory]

    def check(self) -> None:
        """Refuse a peer's map that contradicts itself, or whose addresses would overflow."""
        if not all(map(_is_arena, self.arenas)) or not all(map(self._is_group, self.groups)):
            raise TransferError("a peer describes its memory in a way that makes no sense; run the same version")

    def _is_group(self, group: GroupMemory) -> bool:
        if not 0 <= group.arena < len(self.arenas) or min(group.planes, group.page_tokens, group.plane_slot_bytes) <= 0:
            return False
        return group.planes * group.plane_bytes <= self.arenas[group.arena].page_bytes


def _is_arena(arena: ArenaMemory) -> bool:
    if arena.base <= 0 or arena.page_bytes <= 0 or arena.num_pages < 0:
        return False
    return arena.base + arena.total_bytes < ADDRESS_END


class Spans(NamedTuple):
    """Bytes to copy: `lengths[i]` bytes from `sources[i]` to `destinations[i]`."""

    sources: Addresses
    destinations: Addresses
    lengths: Addresses

    @property
    def total_bytes(self) -> int:
        return int(self.lengths.sum())


def spans(
    source: MemoryMap, source_group: int, destination: MemoryMap, destination_group: int, runs: Sequence[SlotRun]
) -> Spans:
    """Returns the bytes of these runs on both sides."""
    if not 0 <= source_group < len(source.groups):
        raise TransferError(f"the peer has no KV group {source_group}; run the same version on both workers")
    there, here = source.groups[source_group], destination.groups[destination_group]
    from_arena, to_arena = source.arenas[there.arena], destination.arenas[here.arena]
    if (there.planes, there.plane_slot_bytes) != (here.planes, here.plane_slot_bytes):
        raise TransferError("the peer's slots of a group have another shape; run the same model on both workers")
    table = np.array(runs, dtype=np.uint64).reshape(len(runs), len(SlotRun._fields))
    pages_there, offsets_there, pages_here, offsets_here, slots = (table[:, column] for column in range(5))
    for pages, arena in ((pages_there, from_arena), (pages_here, to_arena)):
        if len(pages) and int(pages.max()) >= arena.num_pages:
            raise TransferError("a transfer names a page that does not exist; ask the peer for a new offer")
    if len(runs) and (
        int((offsets_there + slots).max()) > there.page_tokens or int((offsets_here + slots).max()) > here.page_tokens
    ):
        raise TransferError("a transfer names slots past the end of a page; ask the peer for a new offer")
    slot_bytes = np.uint64(here.plane_slot_bytes)
    whole = (slots == here.page_tokens) if here.page_tokens == there.page_tokens else np.zeros(len(runs), dtype=bool)
    starts_there = np.uint64(from_arena.base) + pages_there * np.uint64(from_arena.page_bytes)
    starts_here = np.uint64(to_arena.base) + pages_here * np.uint64(to_arena.page_bytes)
    part = ~whole
    planes = np.arange(here.planes, dtype=np.uint64)

    def per_plane(starts: Addresses, offsets: Addresses, plane_bytes: int) -> Addresses:
        first = starts[part] + offsets[part] * slot_bytes
        addresses: Addresses = first[:, None] + planes[None, :] * np.uint64(plane_bytes)
        return addresses.reshape(-1)

    sources = np.concatenate([starts_there[whole], per_plane(starts_there, offsets_there, there.plane_bytes)])
    destinations = np.concatenate([starts_here[whole], per_plane(starts_here, offsets_here, here.plane_bytes)])
    page_bytes = np.full(int(whole.sum()), here.planes * here.plane_bytes, dtype=np.uint64)
    lengths = np.concatenate([page_bytes, np.repeat(slots[part] * slot_bytes, here.planes)])
    return Spans(sources, destinations, lengths)
