"""Are there others on the machine? Torch-free, so that whoever asks does not pay for it."""

from __future__ import annotations

import os

BUSY_SHARE = 0.5
# Threads that wait for each other wait for every one of them to get a core: PyTorch loses a factor of ten.
OF_THREADS = ", and least of all the ratios; --num-threads 1 distorts them less"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def how_busy(advice: str = "") -> str | None:
    """A warning if others use the machine; call it before anything runs."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load < BUSY_SHARE * cores:
        return None
    return f"the machine is busy (load {load:.1f} on {cores} cores): do not trust the figures{advice}"
