"""Which pages memory of the host keeps, and that what it hands out is what its key says."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest

from outrider.transfer.tier import Done, TierPage
from outrider.transfer.tiers.copying import MemoryCopier, PageAddresses
from outrider.transfer.tiers.host import CopyEnded, HostTier
from outrider.transfer.tiers.sealing import TRAILER_BYTES, Sealer

TARGET, DRAFT = 0, 1


class InstantCopier:
    """Copies at once; values are keys."""

    def __init__(self) -> None:
        self.ended: list[CopyEnded] = []
        self.broken: set[bytes] = set()
        self.recycled: list[bytes] = []
        self.holds_back = False
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1

    def copy_out(self, number: int, pages: Sequence[TierPage]) -> None:
        self.ended.append(CopyEnded(number, [page.key for page in pages]))

    def copy_in(self, number: int, pages: Sequence[TierPage], values: Sequence[Any]) -> None:
        self.ended.append(CopyEnded(number, [value not in self.broken for value in values]))

    def recycle(self, value: bytes) -> None:
        self.recycled.append(value)

    def poll(self) -> list[CopyEnded]:
        if self.holds_back:
            return []
        ended, self.ended = self.ended, []
        return ended

    def fileno(self) -> int:
        return -1

    def close(self) -> None: ...


def digest(*parts: object) -> bytes:
    return sha256(repr(parts).encode()).digest()


def text_pages(name: str, count: int, *, groups: Sequence[int] = (TARGET,)) -> list[TierPage]:
    """Pages of one text, group after group at each place."""
    bases = [digest("root"), *(digest(name, number) for number in range(count))]
    return [
        TierPage(digest("tag", group) + bases[number + 1], group, 1 + number, bases[number])
        for number in range(count)
        for group in groups
    ]


def put(tier: HostTier, pages: Sequence[TierPage], number: int = 1) -> tuple[bool, ...]:
    tier.put(number, pages)
    (done,) = tier.poll()
    assert done.number == number
    return done.outcomes


def held(tier: HostTier, pages: Sequence[TierPage]) -> list[bool]:
    return [tier.contains(page.key) for page in pages]


def make(capacity_pages: int) -> tuple[HostTier, InstantCopier]:
    copier = InstantCopier()
    return HostTier(copier, page_bytes=(10, 10), capacity_bytes=10 * capacity_pages), copier


def test_a_text_is_given_up_from_its_end_and_the_oldest_text_first() -> None:
    tier, copier = make(6)
    old, new = text_pages("old", 4), text_pages("new", 4)
    assert all(put(tier, old))
    assert all(put(tier, new))
    assert held(tier, old) == [True, True, False, False]
    assert held(tier, new) == [True] * 4
    assert tier.used_bytes == 60
    assert copier.recycled == [old[3].key, old[2].key]


def test_what_was_touched_stays_longest() -> None:
    tier, _copier = make(6)
    one, two = text_pages("one", 3), text_pages("two", 3)
    put(tier, one)
    put(tier, two)
    tier.touch([page.key for page in reversed(one)])
    put(tier, text_pages("three", 3))
    assert held(tier, one) == [True] * 3
    assert held(tier, two) == [False] * 3


@pytest.mark.parametrize("order", [(TARGET, DRAFT), (DRAFT, TARGET)])
def test_a_drafters_page_outlives_the_targets_beside_it(order: tuple[int, int]) -> None:
    tier, _copier = make(8)
    pages = text_pages("text", 4, groups=order)
    put(tier, pages)
    for others in range(1, 8):
        put(tier, text_pages(f"other {others}", 1))
        kept = [page for page in pages if tier.contains(page.key)]
        targets = [page.page for page in kept if page.group == TARGET]
        drafts = [page.page for page in kept if page.group == DRAFT]
        assert targets == list(range(1, 1 + len(targets))), "no gap"
        assert len(targets) <= len(drafts) <= len(targets) + 1


def test_pages_that_are_being_read_are_not_given_up() -> None:
    tier, copier = make(2)
    pages = text_pages("text", 2)
    put(tier, pages)
    copier.holds_back = True
    tier.get(7, pages)
    tier.put(8, text_pages("other", 2))
    copier.holds_back = False
    assert tier.poll() == [Done(8, (False, False)), Done(7, (True, True))]
    assert all(put(tier, text_pages("other", 2)))
    assert held(tier, pages) == [False, False]


def test_a_value_whose_trailer_is_wrong_is_a_miss_and_goes() -> None:
    tier, copier = make(4)
    pages = text_pages("text", 3)
    put(tier, pages)
    copier.broken.add(pages[1].key)
    tier.get(2, pages)
    assert tier.poll() == [Done(2, (True, False, True), refused=1)]
    assert held(tier, pages) == [True, False, True]
    assert tier.used_bytes == 20


def test_a_page_that_is_there_or_on_its_way_is_not_stored_twice() -> None:
    tier, copier = make(4)
    pages = text_pages("text", 2)
    copier.holds_back = True
    tier.put(1, pages)
    tier.put(2, pages)
    copier.holds_back = False
    done = tier.poll()
    assert [each.number for each in done] == [2, 1]
    assert tier.used_bytes == 20
    assert put(tier, pages) == (True, True)
    assert tier.used_bytes == 20


def test_a_missing_page_is_a_miss_and_an_engine_that_sleeps_is_told() -> None:
    tier, copier = make(4)
    tier.get(3, text_pages("text", 2))
    assert copier.woken == 1
    assert tier.poll() == [Done(3, (False, False))]
    tier.put(4, text_pages("longer", 5))
    tier.poll()
    tier.put(5, text_pages("longer", 4))
    assert copier.woken == 2, "all of them are there"


def test_clearing_leaves_what_is_being_read() -> None:
    tier, copier = make(4)
    one, two = text_pages("one", 1), text_pages("two", 1)
    put(tier, one)
    put(tier, two)
    copier.holds_back = True
    tier.get(5, one)
    tier.clear()
    assert held(tier, [*one, *two]) == [True, False]
    copier.holds_back = False
    assert tier.poll() == [Done(5, (True,))]


# ---- bytes -----------------------------------------------------------------------------------------------


class Device:
    """Pages of 4,096 bytes in memory of this process."""

    def __init__(self, pages: int) -> None:
        self.memory = bytearray(4096 * pages)
        self._buffer = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        base = ctypes.addressof(self._buffer)
        self.addresses = PageAddresses(bases=(base,), strides=(4096,), page_bytes=(4000,), owner=self)

    def fill(self, page: int, byte: int) -> None:
        self.memory[4096 * page : 4096 * page + 4000] = bytes([byte]) * 4000

    def holds(self, page: int, byte: int) -> bool:
        return self.memory[4096 * page : 4096 * page + 4000] == bytes([byte]) * 4000


def wait_for(tier: HostTier) -> list[Done]:
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        done = tier.poll()
        if done:
            return done
        time.sleep(0.001)
    raise AssertionError("nothing ended")


def test_bytes_come_back_as_they_were_and_damage_is_refused() -> None:
    device = Device(8)
    copier = MemoryCopier(device.addresses, Sealer(b"secret"))
    tier = HostTier(copier, page_bytes=(4000,), capacity_bytes=40_000)
    try:
        pages = text_pages("text", 3)
        for page in pages:
            device.fill(page.page, page.page)
        tier.put(1, pages)
        assert wait_for(tier) == [Done(1, (True, True, True))]
        for page in pages:
            device.fill(page.page, 0)
        tier._entries[pages[1].key].value.data[3999] ^= 0x80
        elsewhere = [page._replace(page=page.page + 3) for page in pages]
        tier.get(2, elsewhere)
        assert wait_for(tier) == [Done(2, (True, False, True), refused=1)]
        assert device.holds(4, 1)
        assert device.holds(5, 0), "nothing of a damaged value reaches the device"
        assert device.holds(6, 3)
        assert all(byte == 0 for byte in device.memory[4096 * 4 + 4000 : 4096 * 5]), "nothing past the page"
    finally:
        tier.close()


def test_buffers_are_used_again() -> None:
    device = Device(4)
    copier = MemoryCopier(device.addresses, Sealer(b"secret"))
    tier = HostTier(copier, page_bytes=(4000,), capacity_bytes=4000)
    try:
        buffers = set()
        for number in range(1, 6):
            tier.put(number, text_pages(f"text {number}", 1))
            assert wait_for(tier) == [Done(number, (True,))]
            (entry,) = tier._entries.values()
            buffers.add(id(entry.value.data))
        assert len(buffers) == 1
    finally:
        tier.close()
        tier.close()


def test_a_trailer_stands_for_the_key_the_bytes_and_the_secret() -> None:
    sealer, data = Sealer(b"one secret"), b"bytes of a page"
    trailer = sealer.trailer(b"key", data)
    assert len(trailer) == TRAILER_BYTES
    assert sealer.is_intact(b"key", data, trailer)
    assert sealer.is_intact(b"key", memoryview(bytearray(data)), bytearray(trailer))
    assert not sealer.is_intact(b"kez", data, trailer)
    assert not sealer.is_intact(b"key", data[:-1], trailer)
    assert not sealer.is_intact(b"key", data, trailer[:-1] + bytes([trailer[-1] ^ 1]))
    assert not sealer.is_intact(b"key", data, b"")
    assert not Sealer(b"another secret").is_intact(b"key", data, trailer)
    # Bytes of the key cannot be taken for bytes of the page.
    assert sealer.trailer(b"ke", b"y" + data) != trailer
