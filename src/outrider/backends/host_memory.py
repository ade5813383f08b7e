"""Host memory for pages of the KV cache."""

from __future__ import annotations

import os

from outrider.errors import ConfigError

DEFAULT_KV_BYTES = 2 << 30
FRACTION_OF_FREE_MEMORY = 0.4
"""The largest part of free memory that the KV cache takes by default, since other processes need memory too."""


def free_kv_bytes() -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(DEFAULT_KV_BYTES, int(free * FRACTION_OF_FREE_MEMORY))


def check_kv_bytes(kv_bytes: int) -> None:
    """Refuses a budget above the machine's memory. The system allocates pages when they are first written, so a
    shortage would show only then."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if kv_bytes > machine_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes ({kv_bytes:,}) is more than this machine has ({machine_bytes:,} bytes); lower it"
        )
