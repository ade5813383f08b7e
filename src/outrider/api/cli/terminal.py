"""What commands share when they talk to a person: consoles, progress, Ctrl-C, the line at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.kernels import COMPILING

if TYPE_CHECKING:
    from types import FrameType

    from outrider.engine.outputs import RequestOutput, SpeculationCounts

out = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def progress_bar() -> Progress:
    """On stderr, gone when done, and only if somebody is looking."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


@contextmanager
def loading() -> Iterator[Callable[[str, int, int], None]]:
    """A bar while a model is loaded and kernels are compiled. Yields what to pass as `progress`.

    Where nobody watches there is one line, and only if kernels are compiled: that takes long enough to wonder about.
    """
    said = False

    def told(what: str, done: int, total: int) -> None:
        nonlocal said
        bar.update(task, description=what, completed=done, total=total)
        if what == COMPILING and not errors.is_terminal and not said:
            said = True
            errors.print(f"{what}; later starts read them from disk", soft_wrap=True)

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        task = bar.add_task("loading", total=None)
        yield told


class Interruption:
    """Has the person asked to stop?"""

    def __init__(self) -> None:
        self.wanted = False


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Ctrl-C is noted instead of striking in the middle of a step; a second one strikes."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        # Signals go to the main thread only.
        yield interruption
        return

    def note(_signal: int, _frame: FrameType | None) -> None:
        if interruption.wanted:
            raise KeyboardInterrupt
        interruption.wanted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


def acceptance(speculation: SpeculationCounts) -> str | None:
    """None where nothing was drafted."""
    if not speculation.drafts:
        return None
    return (
        f"acceptance length {speculation.mean_acceptance_length:.2f} "
        f"({speculation.accepted_tokens} of {speculation.draft_tokens} drafts)"
    )


def summary(outputs: Sequence[RequestOutput], speculation: SpeculationCounts, seconds: float) -> str:
    """The line at the end: tokens, tokens/s, acceptance length, cached prompt tokens."""
    tokens = sum(len(continuation.token_ids) for output in outputs for continuation in output.outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.metrics.cached_tokens for output in outputs)
    parts = [
        f"{tokens:,} tokens in {seconds:.2f} s",
        f"{tokens / seconds if seconds else 0.0:.1f} tokens/s",
        acceptance(speculation),
        f"{cached:,} of {prompt:,} prompt tokens cached",
    ]
    return " · ".join(part for part in parts if part)
