"""The backends by name, and the choice of one for a device. A new backend is a folder and one line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, cast

import torch

from outrider.backends import Progress
from outrider.backends.base import Backend
from outrider.errors import ConfigError


class BackendSettings(NamedTuple):
    """The arguments that every backend is built from."""

    device: torch.device
    threads: int | None = None
    """Number of CPU threads; None: one for each core that the process may use."""
    progress: Progress | None = None


BACKENDS = {
    "cpu": "outrider.backends.cpu.backend",
    "cuda": "outrider.backends.cuda.backend",
    "reference": "outrider.backends.reference.backend",
}
"""The module of each backend, imported when it is chosen. It has `unavailable(settings)`, which returns the reason why
the backend cannot be used or None, and `build(settings)`."""
PREFERRED = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "reference")}
"""The backends that `auto` tries on each type of device, the fastest first."""


def select_backend(
    name: str,
    *,
    device: torch.device,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Backend:
    """Returns the named backend, or for `auto` the fastest one that works on this machine."""
    settings = BackendSettings(device, threads, progress)
    for candidate in PREFERRED.get(device.type, ("reference",)) if name == "auto" else (name,):
        module = import_module(BACKENDS[candidate])
        reason = cast("str | None", module.unavailable(settings))
        if reason is None:
            return cast("Callable[[BackendSettings], Backend]", module.build)(settings)
    raise ConfigError(f"backend {name!r} does not work on this machine: {reason}; use auto or reference")
