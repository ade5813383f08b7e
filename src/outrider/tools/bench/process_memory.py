"""Memory of processes, in MB. Torch-free."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path


def resident_mb(pid: int | None = None) -> float:
    """Resident memory of a process, by default of this one."""
    try:
        pages = Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        if pid is not None:
            raise
        return peak_mb()  # a system without /proc
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mb() -> float:
    """Largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes on Linux, bytes on macOS.
    return float(peak) / (2**20 if sys.platform == "darwin" else 2**10)


def child_pids(parent: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        try:
            found = re.search(r"^PPid:\s+(\d+)", (entry / "status").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if found is not None and int(found[1]) == parent:
            yield int(entry.name)


def tree_memory_mb(pid: int) -> float:
    """Memory of a process and all its descendants; a page shared by several of them counts once."""
    return _memory_mb(pid) + sum(tree_memory_mb(child) for child in child_pids(pid))


def _memory_mb(pid: int) -> float:
    """Proportional set size; resident memory where the system does not tell it."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) / 2**10 if found is not None else resident_mb(pid)
