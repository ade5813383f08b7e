"""Chooses the version of the layers' arithmetic for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.errors import ConfigError
from outrider.layers.ops import Ops, TorchOps


def select_ops(
    name: str,
    *,
    device: torch.device,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Ops:
    """auto takes the fastest that works here; a version asked for by name that does not work is an error."""
    if name == "torch" or (name == "auto" and device.type != "cpu"):
        if threads is not None:
            torch.set_num_threads(threads)
        return TorchOps()
    if device.type != "cpu":
        raise ConfigError(f"ops {name!r} run on a CPU, but the device is {device}; use auto or torch")
    # Numba takes a second to import, and a GPU worker has no use for it.
    from outrider.layers.cpu_ops import NumbaOps

    reason = NumbaOps.unavailable()
    if reason is None:
        return NumbaOps(threads=threads, progress=progress)
    if name == "auto":
        return TorchOps()
    raise ConfigError(f"ops 'numba' do not work here: {reason}; use auto or torch")
