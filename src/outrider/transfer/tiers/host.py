"""Memory of this machine behind the device: pages that are evicted from the device can be copied back.

Pages are given up when the budget is full, the least recently used text first, and each text from its end: a page goes
only when no page is left that starts where it ends. At one place the target's page goes before the drafter's, so that
what can be hit can also be drafted for.

This file decides; a `PageCopier` moves the bytes, on a thread of its own. The simulation runs this file on memory that
it makes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from outrider.kv.prefix import DIGEST_BYTES
from outrider.transfer.tier import Done, TierPage

BATCH_MAX = 16
_END = slice(DIGEST_BYTES, 2 * DIGEST_BYTES)
"""The part of a page's key that is the base of the chain where the page ends."""


class CopyEnded(NamedTuple):
    number: int
    values: list[Any]
    """For a copy out: what holds each page now, or None if it could not be copied. For a copy in: whether each value
    was intact, and is on the device."""


class PageCopier(Protocol):
    """Moves bytes between pages of the device and values in the host's memory, without blocking."""

    def copy_out(self, number: int, pages: Sequence[TierPage]) -> None:
        """Copy pages to new values, each sealed under its key."""

    def copy_in(self, number: int, pages: Sequence[TierPage], values: Sequence[Any]) -> None:
        """Copy values whose trailers are right to pages."""

    def recycle(self, value: Any) -> None:
        """Take the memory of a value that is not needed any more."""

    def wake(self) -> None:
        """Have the caller of `poll` called: something ended without a copy."""

    def poll(self) -> list[CopyEnded]: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _Entry:
    __slots__ = ("group", "num_readers", "page_bytes", "parent", "value")

    def __init__(self, value: Any, page: TierPage, page_bytes: int) -> None:
        self.value = value
        self.group = page.group
        self.page_bytes = page_bytes
        self.parent = page.parent
        self.num_readers = 0


class HostTier:
    name = "host"
    is_local = True
    batch_max = BATCH_MAX
    keys_max = 1 << 20

    def __init__(self, copier: PageCopier, *, page_bytes: Sequence[int], capacity_bytes: int) -> None:
        """`page_bytes`: bytes of a page, per group."""
        self._copier = copier
        self._page_bytes = page_bytes
        self._capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Bytes of pages that are held or on their way."""
        self._entries: dict[bytes, _Entry] = {}
        """By key, the least recently used first."""
        self._starting_at: dict[bytes, dict[bytes, None]] = {}
        """Keys of the pages that start at a base of a chain, in the order in which they came."""
        self._puts: dict[int, tuple[Sequence[TierPage], list[TierPage]]] = {}
        """All pages of a put, and those that are being copied."""
        self._gets: dict[int, tuple[Sequence[TierPage], list[TierPage]]] = {}
        self._coming: set[bytes] = set()
        self._done: list[Done] = []

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, key: bytes) -> bool:
        return key in self._entries

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry

    def look_up(self, number: int, keys: Sequence[bytes]) -> None:
        self._done.append(Done(number, tuple(map(self.contains, keys))))

    # ---- storing -----------------------------------------------------------------------------------

    def put(self, number: int, pages: Sequence[TierPage]) -> None:
        copied = []
        for page in pages:
            size = self._page_bytes[page.group]
            if page.key not in self._entries and page.key not in self._coming and self._make_room(size):
                self.used_bytes += size
                self._coming.add(page.key)
                copied.append(page)
        self._puts[number] = (pages, copied)
        if copied:
            self._copier.copy_out(number, copied)
        else:
            self._put_ended(number, [])
            self._copier.wake()

    def _put_ended(self, number: int, values: Sequence[Any]) -> None:
        pages, copied = self._puts.pop(number)
        for page, value in zip(copied, values, strict=True):
            self._coming.discard(page.key)
            if value is None:
                self.used_bytes -= self._page_bytes[page.group]
            else:
                self._entries[page.key] = _Entry(value, page, self._page_bytes[page.group])
                self._starting_at.setdefault(page.parent, {})[page.key] = None
        self._done.append(Done(number, tuple(page.key in self._entries for page in pages)))

    def _make_room(self, size: int) -> bool:
        while self.used_bytes + size > self._capacity_bytes:
            if not self._give_one_up():
                return False
        return True

    def _give_one_up(self) -> bool:
        """Give up the last page of the text that was least recently used; False if all of them are being read."""
        for key in self._entries:
            last = self._last_after(key)
            if not self._entries[last].num_readers:
                self._remove(last)
                return True
        return False

    def _last_after(self, key: bytes) -> bytes:
        """Returns a page that no other page continues, at the end of the text that this page is part of."""
        while True:
            following = self._starting_at.get(key[_END])
            if following is None:
                return self._first_of_its_place(key)
            key = next(iter(following))

    def _first_of_its_place(self, key: bytes) -> bytes:
        """Returns the page, among those that start and end where this one does, of the first group: the target's."""
        beside = [other for other in self._starting_at[self._entries[key].parent] if other[_END] == key[_END]]
        return min(beside, key=lambda other: self._entries[other].group)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.used_bytes -= entry.page_bytes
        beside = self._starting_at[entry.parent]
        del beside[key]
        if not beside:
            del self._starting_at[entry.parent]
        self._copier.recycle(entry.value)

    # ---- loading -----------------------------------------------------------------------------------

    def get(self, number: int, pages: Sequence[TierPage]) -> None:
        held = [page for page in pages if page.key in self._entries]
        self.touch([page.key for page in reversed(held)])
        for page in held:
            self._entries[page.key].num_readers += 1
        self._gets[number] = (pages, held)
        if held:
            self._copier.copy_in(number, held, [self._entries[page.key].value for page in held])
        else:
            self._get_ended(number, [])
            self._copier.wake()

    def _get_ended(self, number: int, intact: Sequence[bool]) -> None:
        pages, held = self._gets.pop(number)
        loaded = set()
        for page, is_intact in zip(held, intact, strict=True):
            entry = self._entries[page.key]
            entry.num_readers -= 1
            if is_intact:
                loaded.add(page.key)
        for page, is_intact in zip(held, intact, strict=True):
            if not is_intact and page.key in self._entries and not self._entries[page.key].num_readers:
                self._remove(page.key)
        refused = len(held) - len(loaded)
        self._done.append(Done(number, tuple(page.key in loaded for page in pages), refused))

    # ---- time --------------------------------------------------------------------------------------

    def poll(self) -> list[Done]:
        for ended in self._copier.poll():
            if ended.number in self._puts:
                self._put_ended(ended.number, ended.values)
            else:
                self._get_ended(ended.number, ended.values)
        done, self._done = self._done, []
        return done

    def clear(self) -> None:
        """Forget every page that is not being read at the moment."""
        for key in [key for key, entry in self._entries.items() if not entry.num_readers]:
            self._remove(key)

    def fileno(self) -> int:
        return self._copier.fileno()

    def close(self) -> None:
        self._copier.close()
