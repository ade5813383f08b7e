"""Do other programs use the machine? Torch-free, so that a caller does not pay for importing it."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

BUSY_LOAD_PER_CORE = 0.5
# Threads that wait for each other wait for every one of them to get a core: PyTorch loses a factor of ten.
THREADS_ADVICE = ", and least of all the ratios; --num-threads 1 distorts them less"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def how_busy(advice: str = "") -> str | None:
    """A warning if other programs use the machine; call it before the measured program runs."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load < BUSY_LOAD_PER_CORE * cores:
        return None
    return f"the machine is busy (load {load:.1f} on {cores} cores): do not trust the figures{advice}"


class OtherLoad:
    """Processor time that programs other than this one and its children use from now on; Linux only."""

    def __init__(self) -> None:
        self._started = perf_counter(), _used_s(), _own_s()

    def cores(self) -> float | None:
        """Cores that others kept busy, on average; None where the system does not tell. Children must have ended."""
        started, used_s, own_s = self._started
        if used_s is None or (now_s := _used_s()) is None or now_s == used_s:
            return None
        return max(0.0, (now_s - used_s) - (_own_s() - own_s)) / (perf_counter() - started)


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _used_s() -> float | None:
    """Seconds of all processors since the system started, except idle ones; what a hypervisor took counts as used."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *rest = map(int, fields)
    # Time of guests, the last two fields, is part of user time already.
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")
