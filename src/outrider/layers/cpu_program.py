"""Calls of compiled kernels, written down once and run again: one call from Python for all layers of a step.

A model of 30 layers takes some 150 calls to run, and Python needs longer for the small ones than they take. What the
calls are told is the same in every step of as many rows; only the rows themselves differ, and those lie in a block of
words that all layers of a group share.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.kernels import jobs
from outrider.kernels.greatest import OUT_WORDS
from outrider.kernels.pool import ENTER, PROGRAM_WORDS, RUN_COPY, RUN_PROGRAM
from outrider.layers.attention import AttentionRows
from outrider.layers.ops import Greatest, Ready, Recorded, Result

_ENTRY = struct.Struct(f"{PROGRAM_WORDS}q")
_STEP = struct.Struct("8q")
_WORD = struct.Struct("q")
_ALIKE_MAX = 64
_KEPT_BYTES_MAX = 4 << 20


class Words:
    """A block of 64-bit words that compiled code reads, as Python writes them."""

    def __init__(self, count: int) -> None:
        self.words = memoryview(bytearray(8 * count))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.words))


class Job(Words):
    def __init__(self) -> None:
        super().__init__(jobs.WORDS)


class Found(Words, Greatest):
    """Filled in by `kernels/greatest.py`."""

    def __init__(self, rows: int, *, shares: bool) -> None:
        super().__init__(OUT_WORDS * rows)
        self._layout = struct.Struct("qff" * rows)
        self._shares = shares

    def read(self) -> tuple[list[int], list[float]]:
        numbers = self._layout.unpack(self.words)
        return list(numbers[::3]), list(numbers[1::3])

    def shares(self) -> list[float] | None:
        return list(self._layout.unpack(self.words)[2::3]) if self._shares else None


class Step(Words):
    """What kernels are told about the rows of one step in one group."""

    def __init__(self) -> None:
        super().__init__(8)
        self._rows: AttentionRows | None = None
        self._kept: list[Tensor] = []

    def holds(self, rows: AttentionRows) -> bool:
        """They were set and nothing was converted for it: whatever numbers are in them now are those that are read."""
        return rows is self._rows

    def set(self, rows: AttentionRows) -> None:
        # Unknown in between: an interrupt may come at any line.
        self._rows = None
        given = (rows.tables, rows.positions, rows.slots, rows.sequence, rows.first_key, rows.stop_key)
        tables, *longs = kept = [
            _laid_out(tensor, torch.int64 if number else torch.int32) for number, tensor in enumerate(given)
        ]
        positions, slots, sequence, first_key, stop_key = [tensor.data_ptr() for tensor in longs]
        _STEP.pack_into(
            self.words,
            0,
            rows.positions.shape[0],
            positions,
            slots,
            sequence,
            tables.data_ptr(),
            tables.stride(0) * 4,
            first_key,
            stop_key,
        )
        self._kept = kept
        self._rows = rows if all(one is other for one, other in zip(given, kept, strict=True)) else None


def _laid_out(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As kernels read it. Asking first is quicker than a conversion that does nothing."""
    if tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


class Program(Recorded[Result]):
    """What was recorded, with all memory that it uses."""

    def __init__(self, pool: int, x: Tensor) -> None:
        self._pool = pool
        self._x = torch.zeros(x.shape, dtype=torch.float32 if x.is_floating_point() else torch.int64)
        """What comes in, while it is recorded, as kernels read it; afterwards, what comes in some other form is copied
        here."""
        self._given: Tensor | None = None
        """What is read, wherever it lies."""
        self._alike: dict[int, tuple[weakref.ref[Tensor], int, Sequence[int]]] = {}
        """What came in lately and is read where it lies: itself, its address, its numbers. Most of it comes once only,
        and then nobody else has it."""
        self._x_address = 0
        self._x_places: list[tuple[memoryview, int, int]] = []
        """Where addresses in it are written down: memory, byte, and how far into it."""
        self._jobs: list[Job] = []
        self._numbers_end: int | None = None
        self._numbers: Sequence[int] = ()
        self._entries: list[bytes] = []
        self._kept: list[object] = []
        self._buffers: list[tuple[Tensor, weakref.ref[Tensor]]] = []
        self._steps: list[tuple[int, Step]] = []
        self._known: dict[int, Step] = {}
        self._results: list[Result] = []
        """One, once it is recorded."""
        self._list: Words | None = None
        self._after: dict[int, tuple[Program[Any], Words]] = {}
        """Lists of another program and this one."""

    # --- while it is recorded -----------------------------------------------------------------------

    def record(self, rows: Sequence[AttentionRows], body: Callable[[Tensor], Result]) -> None:
        for number, each in enumerate(rows):
            if id(each) not in self._known:
                self._known[id(each)] = step = Step()
                self._steps.append((number, step))
        self._results = [body(self._x)]
        self._list = Words(PROGRAM_WORDS * len(self._entries))
        self._list.words[:] = b"".join(self._entries)
        self._find_x()
        # The caller's rows end with its step.
        self._known.clear()
        self._buffers.clear()

    def _find_x(self) -> None:
        """An address is known by its size: no number that a kernel is told comes near one."""
        self._x_address = first = self._x.data_ptr()
        end = first + self._x.numel() * self._x.element_size()
        assert self._list is not None
        for words in (self._list.words, *(job.words for job in self._jobs)):
            for at, word in enumerate(words.cast("q")):
                if first <= word < end:
                    self._x_places.append((words, 8 * at, word - first))

    def add(self, what: int, job: int, parameter: int, count: int = 0) -> None:
        self._entries.append(_ENTRY.pack(what, job, parameter, count))

    def job(self) -> Job:
        job = Job()
        self._jobs.append(job)
        return job

    def keep(self, thing: object) -> None:
        self._kept.append(thing)

    def empty(self, rows: int, width: int) -> Tensor:
        """Memory that nobody who is recorded so far still needs: a result that `body` has dropped is free again."""
        shape = (rows, width)
        free = (buffer for buffer, handed in self._buffers if buffer.shape == shape and handed() is None)
        buffer = next(free, None)
        if buffer is None:
            buffer = torch.empty(shape)
            self._kept.append(buffer)
        # Handed out as an object of its own, whose end is seen.
        handed_out = buffer.view(shape)
        self._buffers = [pair for pair in self._buffers if pair[0] is not buffer]
        self._buffers.append((buffer, weakref.ref(handed_out)))
        return handed_out

    def copy(self, x: Tensor, out: Tensor) -> None:
        for source, target in zip(x, out, strict=True):
            self.add(RUN_COPY, source.data_ptr(), target.data_ptr(), x.shape[1])
        self._kept.append(out)

    def numbers(self, end: int) -> None:
        """What comes in are numbers of rows, of so many."""
        self._numbers_end = end

    def step(self, rows: AttentionRows) -> Step:
        return self._known[id(rows)]

    # --- and when it runs ---------------------------------------------------------------------------

    def run(self, x: Tensor, rows: Sequence[AttentionRows], *, after: Ready | None = None) -> Result:
        assert self._list is not None
        entries = self._list
        count = len(self._entries)
        if after is not None:
            first = after.recorded
            assert isinstance(first, Program)
            first._set(after.x, after.rows)
            entries, count = self._list_after(first), 2
        self._set(x, rows)
        ENTER.call(self._pool, entries.address, RUN_PROGRAM, count)
        return self._results[0]

    def _list_after(self, first: Program[Any]) -> Words:
        """Of the lists of both."""
        known = self._after.get(id(first))
        if known is None or known[0] is not first:
            assert first._list is not None
            assert self._list is not None
            lists = Words(PROGRAM_WORDS * 2)
            both = [(each._list.address, len(each._entries)) for each in (first, self) if each._list is not None]
            lists.words[:] = b"".join(_ENTRY.pack(RUN_PROGRAM, address, count, 0) for address, count in both)
            # It holds the first one, so that no other can come to have the same id.
            known = self._after[id(first)] = (first, lists)
        return known[1]

    def _set(self, x: Tensor, rows: Sequence[AttentionRows]) -> None:
        self._take(x)
        for number, step in self._steps:
            if not step.holds(rows[number]):
                step.set(rows[number])

    def _take(self, x: Tensor) -> None:
        """Have it read where it lies, if it lies as it did when it was recorded. The same tensor as last time costs
        nothing but a look at its numbers."""
        if x is not self._given:
            known = self._alike.get(id(x))
            source, address, numbers = self._look_at(x) if known is None or known[0]() is not x else (x, *known[1:])
            # Unknown in between: an interrupt may come at any line.
            self._given = None
            self._numbers = numbers
            if address != self._x_address:
                self._x_address = 0
                for words, at, offset in self._x_places:
                    _WORD.pack_into(words, at, address + offset)
                self._x_address = address
            self._given = source
        if self._numbers_end is not None:
            check_numbers(self._numbers, self._numbers_end)

    def _look_at(self, x: Tensor) -> tuple[Tensor, int, Sequence[int]]:
        own = self._x
        alike = x.dtype is own.dtype and x.shape == own.shape and x.is_contiguous()
        # Being kept here, a few rows must not keep those of a whole prompt.
        alike = alike and x.untyped_storage().nbytes() <= _KEPT_BYTES_MAX
        source = x if alike else own.copy_(x)
        address, numbers = source.data_ptr(), () if self._numbers_end is None else source.numpy().data
        if alike:
            if len(self._alike) >= _ALIKE_MAX:
                self._alike.clear()
            self._alike[id(x)] = (weakref.ref(x), address, numbers)
        return source, address, numbers


def check_numbers(few: Sequence[int], end: int) -> None:
    """Compiled code would read whatever lies there."""
    lowest, highest = min(few), max(few)
    if lowest < 0 or highest >= end:
        raise IndexError(f"token ids must lie in [0, {end}), found {lowest} to {highest}")
