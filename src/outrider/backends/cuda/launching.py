"""The one place that launches kernels, so that a recorder sees every launch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from triton import knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run on Triton's interpreter, on tensors of the CPU."""

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""A kernel, its grid, its arguments and its constants."""

_observers: list[Callable[[Launch], None]] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a kernel over a grid. An observer that listens runs it instead."""
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
