"""The thread pool that runs the kernels, managed from Python."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import threading
import weakref
from functools import cache
from pathlib import Path

from outrider.backends.cpu.kernels.pool import DONE, ENTER, LIMIT, POOL_BYTES, STOP, THREADS, TICKET, wake_all


def available_cores() -> int:
    """Returns the number of physical cores that this process may run on. A second thread on a core does not speed up
    these kernels."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list")
        try:
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


class Threads:
    """A pool of `count` threads, the caller included. Started at once; ends with the process or when closed."""

    def __init__(self, count: int) -> None:
        assert count >= 1
        self.count = count
        # Never unmapped: a thread may read it while the process exits. Private, because a forked child would otherwise
        # leave its jobs to threads that see other memory, and end them when it exits.
        self._memory = mmap.mmap(-1, max(POOL_BYTES, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._set(THREADS, count)
        self._threads = [
            threading.Thread(target=ENTER.call, args=(self.address, 0, number, 0), name=f"kernel-{number}", daemon=True)
            for number in range(1, count)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)
        _ALL.add(self)

    def forked(self) -> None:
        """Called in a forked child, which has none of the threads: everything runs on the calling thread from now on,
        and anew what a thread was at work on."""
        self._threads = []
        self._set(THREADS, 1)
        if self._word(DONE) != self._word(LIMIT):
            self._set(DONE, 0)
            self._set(TICKET, self._word(TICKET) >> 32 << 32)

    def close(self) -> None:
        """Ends the threads. Later calls run on the calling thread alone."""
        self._set(STOP, 1)
        self._set(THREADS, 1)
        wake_all(self.address)
        for thread in self._threads:
            thread.join()
        self._threads = []
        atexit.unregister(self.close)

    def _set(self, place: int, value: int) -> None:
        ctypes.c_int64.from_address(self.address + place).value = value

    def _word(self, place: int) -> int:
        return ctypes.c_int64.from_address(self.address + place).value


_ALL: weakref.WeakSet[Threads] = weakref.WeakSet()


def _tell_all() -> None:
    for threads in _ALL:
        threads.forked()


os.register_at_fork(after_in_child=_tell_all)


@cache
def shared_threads(count: int) -> Threads:
    """Returns the process-wide pool of this many threads: two models in one process must not compete for the cores."""
    return Threads(count)
