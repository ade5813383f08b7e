"""Spans of bytes against a slow reference that copies slot by slot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.transfer.links.worlds import Layout, Pages, filled, shuffled_runs, slots_of

from outrider.errors import TransferError
from outrider.kv.intervals import Interval, SlotRun
from outrider.transfer.links.memory import ADDRESS_END, ArenaMemory, GroupMemory, MemoryMap, Spans, spans
from outrider.transfer.links.reads import CHUNK_SPANS, DIRECT_CHUNK_BYTES, STAGED_CHUNK_BYTES, chunks

PAGE_SIZES = (1, 4, 8, 16, 32)


def copy(source: Pages, destination: Pages, parts: list[Spans]) -> None:
    """Copy spans between arenas of this process, and nothing outside of them."""

    def view(pages: Pages, address: int, length: int) -> np.ndarray:
        for memory, arena in zip(pages.memory.arenas, pages.arenas, strict=True):
            if memory.base <= address and address + length <= memory.base + memory.total_bytes:
                return arena.reshape(-1)[address - memory.base :][:length]
        raise AssertionError(f"a span leaves the arenas at {address}")

    for part in parts:
        for start, end, length in zip(*(map(int, column) for column in part), strict=True):
            view(destination, end, length)[:] = view(source, start, length)


def slow_copy(source: Pages, destination: Pages, group: int, runs: tuple[SlotRun, ...]) -> None:
    shape = destination.memory.groups[group]
    for page, offset, to_page, to_offset in slots_of(runs):
        row = destination.arenas[shape.arena][to_page][: shape.planes * shape.plane_bytes]
        table = row.reshape(shape.planes, shape.page_tokens, shape.plane_slot_bytes)
        table[:, to_offset] = source.slot(group, page, offset)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_spans_copy_exactly_the_slots(data: st.DataObject) -> None:
    layout = Layout(
        tuple((data.draw(st.integers(1, 5)), data.draw(st.sampled_from((1, 3, 16)))) for _ in range(2)), 128
    )
    sizes = [data.draw(st.sampled_from(PAGE_SIZES)) for _ in range(2)]
    gaps = [data.draw(st.sampled_from((0, 5))) for _ in range(2)]
    seed = data.draw(st.integers(0, 1000))
    source = filled(layout, page_tokens=sizes[0], seed=seed, gap_bytes=gaps[0])
    fast, slow = (filled(layout, page_tokens=sizes[1], seed=seed + 1, gap_bytes=gaps[1]) for _ in range(2))
    start = data.draw(st.integers(0, 127))
    runs = shuffled_runs(source, fast, Interval(start, data.draw(st.integers(start, 128))), seed)
    group = data.draw(st.integers(0, 1))
    found = spans(source.memory, group, fast.memory, group, runs)
    planes, slot_bytes = layout.groups[group]
    num_slots = sum(run.slots for run in runs)
    assert found.total_bytes == num_slots * planes * slot_bytes
    parts = list(chunks(found, STAGED_CHUNK_BYTES))
    assert sum(part.total_bytes for part in parts) == found.total_bytes
    copy(source, fast, parts)
    slow_copy(source, slow, group, runs)
    assert all((left == right).all() for left, right in zip(fast.arenas, slow.arenas, strict=True))


def test_whole_pages_of_one_size_are_single_spans() -> None:
    layout = Layout(((6, 64),), 128)
    source, destination = filled(layout, page_tokens=16, seed=1), filled(layout, page_tokens=16, seed=2)
    runs = shuffled_runs(source, destination, Interval(0, 128), 3)
    assert len(spans(source.memory, 0, destination.memory, 0, runs).lengths) == len(runs) == 8


@pytest.mark.parametrize("limit", [STAGED_CHUNK_BYTES, DIRECT_CHUNK_BYTES])
def test_chunks_are_bounded_and_join_what_is_adjacent(limit: int) -> None:
    lengths = np.full(4096, 64 << 10, dtype=np.uint64)
    addresses = np.cumsum(lengths)
    parts = list(chunks(Spans(addresses, addresses + np.uint64(1 << 40), lengths), limit))
    assert all(part.total_bytes <= limit and len(part.lengths) == 1 for part in parts)
    assert sum(part.total_bytes for part in parts) == 4096 * (64 << 10)
    scattered = list(chunks(Spans(addresses[::-1], addresses, lengths // np.uint64(64)), limit))
    assert max(len(part.lengths) for part in scattered) == CHUNK_SPANS


def test_a_span_larger_than_a_chunk_goes_alone() -> None:
    lengths = np.array([3 * STAGED_CHUNK_BYTES, 1, 2 * STAGED_CHUNK_BYTES], dtype=np.uint64)
    addresses = np.array([0, 1 << 30, 1 << 32], dtype=np.uint64)
    assert [part.total_bytes for part in chunks(Spans(addresses, addresses, lengths), STAGED_CHUNK_BYTES)] == [
        3 * STAGED_CHUNK_BYTES,
        1,
        2 * STAGED_CHUNK_BYTES,
    ]


@pytest.mark.parametrize(
    "run",
    [
        SlotRun(8, 0, 0, 0, 1, 0),
        SlotRun(0, 0, 8, 0, 1, 0),
        SlotRun(0, 15, 0, 0, 2, 0),
        SlotRun(0, 0, 0, 9, 8, 0),
    ],
)
def test_slots_that_do_not_exist_are_refused(run: SlotRun) -> None:
    pages = Pages(Layout(((2, 4),), 128), 16, 0)
    with pytest.raises(TransferError):
        spans(pages.memory, 0, pages.memory, 0, [run])


ARENA = ArenaMemory(base=4096, page_bytes=64, num_pages=4)
GROUP = GroupMemory(arena=0, planes=2, page_tokens=4, plane_slot_bytes=8)


def test_a_map_that_makes_sense_is_taken() -> None:
    MemoryMap(arenas=[ARENA, replace(ARENA, num_pages=0)], groups=[GROUP, replace(GROUP, arena=1)]).check()


@pytest.mark.parametrize(
    "arena",
    [
        {"base": 0},
        {"base": -4096},
        {"page_bytes": 0},
        {"page_bytes": -64},
        {"num_pages": -1},
        {"base": ADDRESS_END - 4 * 64},
        {"num_pages": 1 << 62},
        {"page_bytes": 63},
    ],
)
def test_an_arena_that_makes_no_sense_is_refused(arena: dict[str, int]) -> None:
    with pytest.raises(TransferError, match="makes no sense"):
        MemoryMap(arenas=[replace(ARENA, **arena)], groups=[GROUP]).check()


@pytest.mark.parametrize(
    "group",
    [
        {"arena": 1},
        {"arena": -1},
        {"planes": 0},
        {"planes": 3},
        {"page_tokens": 0},
        {"page_tokens": 5},
        {"plane_slot_bytes": -8},
        {"planes": -1, "page_tokens": -1},
    ],
)
def test_a_group_that_makes_no_sense_is_refused(group: dict[str, int]) -> None:
    with pytest.raises(TransferError, match="makes no sense"):
        MemoryMap(arenas=[ARENA], groups=[replace(GROUP, **group)]).check()
