"""Pages for `outrider bench transfer`: memory as an engine has it, with one prompt in pages in random order.

Two processes that make pages of the same shape and seed have the same bytes in the same places, so that the one that
reads can tell whether the right bytes have come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from outrider.backends.registry import select_backend
from outrider.kv.intervals import Interval, SlotRun, page_count, pair
from outrider.transfer.link import GroupRead
from outrider.transfer.links.memory import ArenaMemory, MemoryMap, Spans, spans

Tables = Sequence[Sequence[int]]
"""For each group, the page that holds each part of the prompt."""


def scaled(shape: MemoryMap, *, page_tokens: int, base_tokens: int) -> MemoryMap:
    """Returns the shape that the engine has with another block size; `shape` is the one with `base_tokens`."""
    groups = [
        msgspec.structs.replace(group, page_tokens=group.page_tokens * page_tokens // base_tokens)
        for group in shape.groups
    ]
    arenas = [
        msgspec.structs.replace(arena, page_bytes=arena.page_bytes * page_tokens // base_tokens)
        for arena in shape.arenas
    ]
    return MemoryMap(arenas=arenas, groups=groups)


class PagedMemory:
    def __init__(self, shape: MemoryMap, *, num_tokens: int, seed: int) -> None:
        """`shape`: an engine's groups and page sizes; its addresses and numbers of pages do not matter."""
        self.num_tokens = num_tokens
        counts = [page_count(num_tokens, group.page_tokens) for group in shape.groups]
        # The null page comes on top.
        sizes = [1] * len(shape.arenas)
        for group, count in zip(shape.groups, counts, strict=True):
            sizes[group.arena] += count
        # The memory of an engine on a CPU, with the huge pages that the system gives it.
        backend = select_backend("auto", device=torch.device("cpu"), threads=1)
        self._pages = [
            backend.zeros((size, arena.page_bytes), torch.uint8)
            for size, arena in zip(sizes, shape.arenas, strict=True)
        ]
        self.map = MemoryMap(
            arenas=[
                ArenaMemory(base=pages.data_ptr(), page_bytes=pages.shape[1], num_pages=pages.shape[0])
                for pages in self._pages
            ],
            groups=shape.groups,
        )
        self.tables: list[list[int]] = []
        orders = [
            iter(1 + np.random.default_rng([seed, arena]).permutation(size - 1)) for arena, size in enumerate(sizes)
        ]
        for group, count in zip(shape.groups, counts, strict=True):
            self.tables.append([int(next(orders[group.arena])) for _ in range(count)])
        self._generator = torch.Generator().manual_seed(seed)

    def fill(self) -> None:
        for pages in self._pages:
            pages.random_(0, 256, generator=self._generator)

    def clear(self) -> None:
        for pages in self._pages:
            pages.zero_()


def prompt_runs(
    source: MemoryMap, source_tables: Tables, there: MemoryMap, tables: Tables, num_tokens: int
) -> list[tuple[SlotRun, ...]]:
    """Returns the runs of slots that copy a prompt, for each group."""
    whole = Interval(0, num_tokens)
    return [
        tuple(
            pair(
                whole,
                source=whole,
                source_pages=source_tables[group],
                source_page_tokens=source.groups[group].page_tokens,
                destination_pages=tables[group],
                destination_page_tokens=there.groups[group].page_tokens,
            )
        )
        for group in range(len(source.groups))
    ]


def group_reads(runs: Sequence[tuple[SlotRun, ...]]) -> list[GroupRead]:
    return [GroupRead(group, group, each) for group, each in enumerate(runs)]


def all_spans(source: MemoryMap, destination: MemoryMap, runs: Sequence[tuple[SlotRun, ...]]) -> Spans:
    """Returns the bytes of all groups together."""
    parts = [spans(source, group, destination, group, each) for group, each in enumerate(runs)]
    return Spans(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def equal(copied: Spans) -> bool:
    """Whether the destinations hold what the sources hold, both in this process."""
    return all(
        ctypes.string_at(source, length) == ctypes.string_at(destination, length)
        for source, destination, length in zip(*(column.tolist() for column in copied), strict=True)
    )
