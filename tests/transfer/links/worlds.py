"""Pages for tests of links: memory with a known layout and random bytes, and a slow way to find slots in it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.kv.intervals import Interval, SlotRun, pair
from outrider.transfer.links.memory import ArenaMemory, GroupMemory, MemoryMap

DIGEST = b"the same layout!"
KEY = "a key that the tests share"


class Layout(NamedTuple):
    """Planes and bytes of a slot in one plane, for each group; each group has an arena of its own."""

    groups: tuple[tuple[int, int], ...]
    num_tokens: int
    """Number of slots of each arena."""


ENGINE_LAYOUTS = {
    "small": Layout(((6, 64), (4, 32)), 2048),
    # About 200 MB, so that a read over tcp is still on its way when its peer is stopped.
    "large": Layout(((24, 128),), 65536),
}


class Pages:
    """Arenas with their map."""

    def __init__(self, layout: Layout, page_tokens: int, gap_bytes: int) -> None:
        self.page_tokens = page_tokens
        self.num_pages = layout.num_tokens // page_tokens
        sizes = [planes * slot * page_tokens + gap_bytes for planes, slot in layout.groups]
        self.arenas = [np.zeros((self.num_pages, size), dtype=np.uint8) for size in sizes]
        self.memory = MemoryMap(
            arenas=[
                ArenaMemory(base=arena.ctypes.data, page_bytes=arena.shape[1], num_pages=arena.shape[0])
                for arena in self.arenas
            ],
            groups=[
                GroupMemory(arena=number, planes=planes, page_tokens=page_tokens, plane_slot_bytes=slot)
                for number, (planes, slot) in enumerate(layout.groups)
            ],
        )

    def slot(self, group: int, page: int, offset: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of one slot, plane by plane, as a copy."""
        shape = self.memory.groups[group]
        row = self.arenas[shape.arena][page][: shape.planes * shape.plane_bytes]
        return row.reshape(shape.planes, shape.page_tokens, shape.plane_slot_bytes)[:, offset].copy()


def filled(layout: Layout, *, page_tokens: int, seed: int, gap_bytes: int = 0) -> Pages:
    """Returns pages with random bytes, the same for the same seed."""
    pages = Pages(layout, page_tokens, gap_bytes)
    generator = np.random.default_rng(seed)
    for arena in pages.arenas:
        arena[:] = generator.integers(0, 256, arena.shape, dtype=np.uint8)
    return pages


def shuffled_runs(source: Pages, destination: Pages, interval: Interval, seed: int) -> tuple[SlotRun, ...]:
    """Returns the runs that copy an interval between pages in random order on both sides."""
    generator = np.random.default_rng(seed)
    tables = [[int(page) for page in generator.permutation(pages.num_pages)] for pages in (source, destination)]
    return tuple(
        pair(
            interval,
            source=interval,
            source_pages=tables[0],
            source_page_tokens=source.page_tokens,
            destination_pages=tables[1],
            destination_page_tokens=destination.page_tokens,
        )
    )


def slots_of(runs: Sequence[SlotRun]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (source page, source offset, destination page, destination offset) of each slot."""
    for run in runs:
        for slot in range(run.slots):
            yield run.source_page, run.source_offset + slot, run.destination_page, run.destination_offset + slot
