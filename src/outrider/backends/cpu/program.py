"""Calls of compiled kernels, recorded once and replayed: one call from Python for all layers of a step.

A model of 30 layers takes some 150 kernel calls, and for small kernels the call from Python takes longer than the
kernel. The arguments of kernels are the same in every step with the same number of rows. Only the rows themselves
differ, and these are described by a block of words that all layers of a KV group share.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.base import Argmax
from outrider.backends.cpu.kernels import jobs
from outrider.backends.cpu.kernels.argmax import OUT_WORDS
from outrider.backends.cpu.kernels.pool import ALONE, BEGIN, ENTER, POOL, PROGRAM_WORDS, RUN_COPY, RUN_PROGRAM
from outrider.backends.cpu.kernels.probability import largest_probabilities
from outrider.backends.reference.backend import TorchArgmax

Result = TypeVar("Result")

_ENTRY = struct.Struct(f"{PROGRAM_WORDS}q")
_GROUP = struct.Struct("8q")
_WORD = struct.Struct("q")
_HEADER = struct.Struct("4q")
_PROGRAM = struct.Struct("3q")
RECORDED_ROWS_MAX = 64
"""The most rows of a recorded pass. Passes of more rows take so long that the calls from Python do not matter."""
_METADATA_KEPT = 2


class Words:
    """A block of 64-bit words that Python writes and compiled code reads."""

    def __init__(self, count: int) -> None:
        self.words = memoryview(bytearray(8 * count))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.words))


class Job(Words):
    def __init__(self) -> None:
        super().__init__(jobs.WORDS)


class RecordedArgmax(Words, Argmax):
    """The argmax that `kernels/argmax.py` writes whenever a program runs."""

    def __init__(self, rows: int, *, probabilities: bool) -> None:
        super().__init__(OUT_WORDS * rows)
        self._layout = struct.Struct("qff" * rows)
        self._has_probabilities = probabilities

    def read(self) -> tuple[list[int], list[float]]:
        numbers = self._layout.unpack(self.words)
        return list(numbers[::3]), list(numbers[1::3])

    def probabilities(self) -> list[float]:
        assert self._has_probabilities, "probabilities were not asked for when the pass was recorded"
        return list(self._layout.unpack(self.words)[2::3])


class CPUArgmax(TorchArgmax):
    """The argmax of logits that are in memory, with probabilities by a compiled kernel."""

    def probabilities(self) -> list[float]:
        return largest_probabilities(self._logits)


class GroupWords(Words):
    """The words that describe the rows of a batch in one KV group to kernels: see `kernels/rotate.py`."""

    def __init__(self) -> None:
        super().__init__(8)
        self._current: AttentionMetadata | None = None
        self._packed: list[tuple[AttentionMetadata, bytes]] = []
        """The words of the latest batches. The same metadata objects return with other numbers in their tensors."""

    def set(self, metadata: AttentionMetadata) -> None:
        if metadata is self._current:
            return
        words = next((words for known, words in self._packed if known is metadata), b"")
        if not words:
            words = self._words_of(metadata)
            self._packed = [*self._packed[1 - _METADATA_KEPT :], (metadata, words)]
        # Reset in between: an interrupt may come at any line.
        self._current = None
        self.words[:] = words
        self._current = metadata

    @staticmethod
    def _words_of(metadata: AttentionMetadata) -> bytes:
        tables = metadata.block_tables
        longs = (
            metadata.positions,
            metadata.slot_mapping,
            metadata.table_rows,
            metadata.first_key,
            metadata.stop_key,
        )
        assert tables.dtype is torch.int32 and tables.is_contiguous()
        assert all(tensor.dtype is torch.int64 and tensor.is_contiguous() for tensor in longs)
        positions, slot_mapping, table_rows, first_key, stop_key = [tensor.data_ptr() for tensor in longs]
        return _GROUP.pack(
            metadata.positions.shape[0],
            positions,
            slot_mapping,
            table_rows,
            tables.data_ptr(),
            tables.stride(0) * 4,
            first_key,
            stop_key,
        )


class SharedBuffers:
    """Memory for the intermediate and final results of all programs of a pass, since only the results of the latest run
    are valid."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def take(self, number: int, rows: int, width: int) -> Tensor:
        """Returns the memory for a program's buffer of this width that has this number among those of this width."""
        buffer = self._buffers.get((number, width))
        if buffer is None or buffer.numel() < rows * width:
            # Room for the largest recorded number of rows: memory that is never written takes no room.
            buffer = self._buffers[number, width] = torch.empty(max(rows, RECORDED_ROWS_MAX) * width)
        return buffer[: rows * width].view(rows, width)


class Replay(NamedTuple):
    """A program with the input and metadata to run it on."""

    program: Program[Any]
    x: Tensor
    groups: Sequence[AttentionMetadata]


class Program(Generic[Result]):
    """A recorded pass with all the memory that it uses."""

    def __init__(self, pool: int, x: Tensor, shared: SharedBuffers) -> None:
        self._pool = pool
        self._x = torch.zeros(x.shape, dtype=torch.float32 if x.is_floating_point() else torch.int64)
        """The stand-in for the input while the pass is recorded. An input of another type or layout is copied here."""
        self._x_address = 0
        self._x_places: list[tuple[memoryview, int, int]] = []
        """The places that hold addresses in the input: memory, byte offset there, and offset into the input."""
        self._jobs: list[Job] = []
        self._token_limit: int | None = None
        """The limit of token ids in the input; None if it holds hidden states."""
        self._entries: list[bytes] = []
        self._kept: list[object] = []
        self._shared = shared
        self._buffers: list[tuple[Tensor, weakref.ref[Tensor]]] = []
        self._groups: list[GroupWords] = []
        self._recorded_groups: Sequence[AttentionMetadata] = ()
        self._results: list[Result] = []
        """The result, as the only element, once the pass is recorded."""
        self._list = Words(1)
        self._lists_after: weakref.WeakKeyDictionary[Program[Any], Words] = weakref.WeakKeyDictionary()
        """For other programs, the list that runs that program and then this one."""

    # ---- recording ---------------------------------------------------------------------------------

    def record(self, groups: Sequence[AttentionMetadata], call: Callable[[Tensor], Result]) -> None:
        """Records the operations that `call` makes with an input. The backend passes its kernel calls to the methods
        below."""
        self._recorded_groups = groups
        self._groups = [GroupWords() for _ in groups]
        self._results = [call(self._x)]
        self._list = Words(PROGRAM_WORDS * len(self._entries))
        self._list.words[:] = b"".join(self._entries)
        self._find_x()
        # The caller's metadata is valid only during its step.
        self._recorded_groups = ()
        self._buffers.clear()

    def _find_x(self) -> None:
        """Finds the words that are addresses in the input. No other argument of a kernel has a value near an
        address."""
        self._x_address = first = self._x.data_ptr()
        end = first + self._x.numel() * self._x.element_size()
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
        """Returns memory that no recorded operation still needs: the memory of a result is free once the pass has
        dropped it."""
        shape = (rows, width)
        free = (buffer for buffer, handed_out in self._buffers if buffer.shape == shape and handed_out() is None)
        buffer = next(free, None)
        if buffer is None:
            number = sum(other.shape[1] == width for other, _handed_out in self._buffers)
            buffer = self._shared.take(number, rows, width)
            self._kept.append(buffer)
        # A view of its own, so that its deletion is noticed.
        handed_out = buffer.view(shape)
        self._buffers = [pair for pair in self._buffers if pair[0] is not buffer]
        self._buffers.append((buffer, weakref.ref(handed_out)))
        return handed_out

    def copy(self, x: Tensor, out: Tensor) -> None:
        for source, target in zip(x, out, strict=True):
            self.add(RUN_COPY, source.data_ptr(), target.data_ptr(), x.shape[1])
        self._kept.append(out)

    def takes_token_ids(self, limit: int) -> None:
        self._token_limit = limit

    def group_words(self, metadata: AttentionMetadata) -> GroupWords:
        pairs = zip(self._recorded_groups, self._groups, strict=True)
        return next(words for known, words in pairs if known is metadata)

    # ---- replaying ---------------------------------------------------------------------------------

    def run(self, x: Tensor, groups: Sequence[AttentionMetadata], *, after: Replay | None = None) -> Result:
        """Runs the program on an input of the recorded shape. `after`: a program to run first, in the same call."""
        entries, count = self._list, len(self._entries)
        if after is not None:
            after.program._set(after.x, after.groups)
            entries, count = self._list_after(after.program), 2
        self._set(x, groups)
        ENTER.call(self._pool, entries.address, RUN_PROGRAM, count)
        return self._results[0]

    def begin(self, x: Tensor, groups: Sequence[AttentionMetadata], job: Job) -> None:
        """Leaves the program to a thread of the pool. It ends with `SETTLE` of the job; until then the job, the input
        and the metadata must not change."""
        self._set(x, groups)
        _HEADER.pack_into(job.words, 0, ALONE.address, 1, 0, 0)
        _PROGRAM.pack_into(job.words, 8 * POOL, self._pool, self._list.address, len(self._entries))
        ENTER.call(self._pool, job.address, BEGIN, 0)

    def _list_after(self, first: Program[Any]) -> Words:
        lists = self._lists_after.get(first)
        if lists is None:
            lists = Words(PROGRAM_WORDS * 2)
            both = [(each._list.address, len(each._entries)) for each in (first, self)]
            lists.words[:] = b"".join(_ENTRY.pack(RUN_PROGRAM, address, count, 0) for address, count in both)
            self._lists_after[first] = lists
        return lists

    def _set(self, x: Tensor, groups: Sequence[AttentionMetadata]) -> None:
        self._set_input(x)
        for words, metadata in zip(self._groups, groups, strict=True):
            words.set(metadata)

    def _set_input(self, x: Tensor) -> None:
        """Points the program at the input, or at a copy if its type or layout differs from the recorded one."""
        own = self._x
        if x.dtype is not own.dtype or x.shape != own.shape or not x.is_contiguous():
            x = own.copy_(x)
        if self._token_limit is not None:
            check_token_ids(x.tolist(), self._token_limit)
        address = x.data_ptr()
        if address != self._x_address:
            # Reset in between: an interrupt may come at any line.
            self._x_address = 0
            for words, at, offset in self._x_places:
                _WORD.pack_into(words, at, address + offset)
            self._x_address = address


def check_token_ids(token_ids: Sequence[int], limit: int) -> None:
    """Refuses ids outside [0, limit), for which compiled code would read other memory."""
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= limit:
        raise IndexError(f"token ids must lie in [0, {limit}), found {lowest} to {highest}")
