"""Compilation of kernels: separately for each element type, and cached on disk.

A kernel is a C function of (job, chunk, scratch) that is called by address. If kernels were called by name, Numba would
compile each of them again inside every caller, which takes minutes instead of seconds.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from numba import cfunc, njit
from numba.core.event import Event, Listener, install_listener

from outrider.backends import COMPILING, Progress
from outrider.backends.cpu.kernels.vector import BFLOAT16, COARSE, EIGHT_BITS, FLOAT16, FLOAT32, FOUR_BITS

LOADING = "loading kernels"
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
UNBOUND: Any = None
"""Placeholder for a global name that `specialised` binds."""
ITEMS = {
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    FLOAT16: "float16",
    FOUR_BITS: "four_bits",
    EIGHT_BITS: "eight_bits",
    COARSE: "coarse",
}
_SOURCES = (
    "activations",
    "argmax",
    "attention",
    "batch_rows",
    "coarse",
    "compiling",
    "gather",
    "jobs",
    "linear",
    "memory",
    "narrow",
    "norm",
    "packed",
    "pool",
    "probability",
    "rotate",
    "softmax",
    "tiles",
    "vector",
)


@cache
def _fingerprint() -> str:
    """Returns a hash of all sources that a kernel may be made of. Numba itself checks only the file of the function."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def specialised(function: Callable[..., Any], name: str, **names: Any) -> Callable[..., Any]:
    """Returns a copy of the function, under another name, with some of its global names bound to other values."""
    original = cast(FunctionType, function)
    copy = FunctionType(original.__code__, {**original.__globals__, **names}, name)
    copy.__qualname__ = name
    copy.__module__ = original.__module__
    return copy


def part(function: Callable[..., Any], item: int, **names: Any) -> Any:
    """Returns a helper function of a kernel, compiled for one element type."""
    return njit(**OPTIONS)(specialised(function, f"{function.__name__}_{ITEMS[item]}", **names))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers SIGINT: an interrupt during an import or Numba's bookkeeping would be swallowed there or leave it
    broken."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        signal.raise_signal(signal.SIGINT)


class _Alarm(Listener):
    """Makes a call when the compiler starts for the first time."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self.rung = call, False

    def on_start(self, event: Event) -> None:
        if not self.rung:
            self.rung = True
            self._call()

    def on_end(self, event: Event) -> None:
        pass


@contextmanager
def noticing_compilation(call: Callable[[], None]) -> Iterator[None]:
    """Makes the call at most once, when the body compiles something that is not cached on disk."""
    # Compiler passes run only where the cache has no entry.
    with install_listener("numba:run_pass", _Alarm(call)):
        yield


class Kernel:
    """A C function void(job, chunk, scratch), compiled or read from disk when its address is first read."""

    def __init__(self, function: Callable[..., Any], item: int, **names: Any) -> None:
        self.name = f"{function.__name__}_{ITEMS[item]}"
        self._function = specialised(function, f"{self.name}_{_fingerprint()}", **names)
        self._compiled: Any = None
        self._address = 0

    @property
    def address(self) -> int:
        if not self._address:
            with uninterrupted():
                self._compiled = cfunc("void(int64, int64, int64)", cache=True, error_model="numpy")(self._function)
                self._address = cast(int, self._compiled.address)
        return self._address


class Entry:
    """A compiled function that Python calls with the interpreter lock released."""

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        named = specialised(function, f"{function.__name__}_{_fingerprint()}")
        self._signature = signature
        self.call: Any = njit(cache=True, **OPTIONS)(named)

    def compile(self) -> None:
        with uninterrupted():
            self.call.compile(self._signature)


def load_entry(entry: Entry, progress: Progress) -> None:
    """Loads a function. Reports progress only if it has to be compiled."""
    with noticing_compilation(lambda: progress(COMPILING, 0, 1)):
        entry.compile()


def load_all(kernels: Sequence[Kernel], progress: Progress) -> None:
    """Loads kernels. Progress distinguishes kernels that are compiled from kernels that are read from disk."""
    doing = LOADING

    def compiling() -> None:
        nonlocal doing
        doing = COMPILING
        progress(doing, number, len(kernels))

    with noticing_compilation(compiling):
        for number, kernel in enumerate(kernels):
            progress(doing, number, len(kernels))
            assert kernel.address
    progress(doing, len(kernels), len(kernels))
