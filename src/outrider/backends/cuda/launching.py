"""The one place that launches kernels, so that a recorder sees every launch.

On Hopper and later, kernels are launched as programmatic dependents: a kernel starts while the one before it still runs
and waits, before it reads what any other kernel has written, until that one has ended. Only constants, such as weights,
may be touched before.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run on Triton's interpreter, on tensors of the CPU."""


@cache
def overlaps() -> bool:
    """Returns whether kernels start before the one before them has ended."""
    if INTERPRETED:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9


Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""A kernel, its grid, its arguments and its constants."""

_observers: list[Callable[[Launch], None]] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a kernel over a grid. An observer that listens runs it instead."""
    if "OVERLAP" in kernel.arg_names:
        constants["OVERLAP"] = overlaps()
        if overlaps():
            constants["launch_pdl"] = True
    call = (kernel, grid, args, constants)
    if _observers:
        _observers[-1](call)
    else:
        run(call)


def run(call: Launch) -> None:
    kernel, grid, args, constants = call
    kernel[grid](*args, **constants)


@contextmanager
def observed(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Hands all launches to an observer, which must run them itself."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least this number."""
    return 1 << max(0, number - 1).bit_length()
