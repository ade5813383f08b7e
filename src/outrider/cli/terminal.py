"""What commands print with: consoles, progress bars, Ctrl-C in the middle of an answer, the summary line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outrider.backends import COMPILING

if TYPE_CHECKING:
    from types import FrameType

    from outrider.engine.outputs import RequestOutput, SpeculationCounts

out = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def note(text: str | None) -> None:
    """Prints a remark about a measurement on stderr, if there is one."""
    if text is not None:
        errors.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)


def plain_table(title: str, *headings: str) -> Table:
    """Returns a table without lines: its first column on the left, the numbers in all others on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table


def ratio_text(measure: Mapping[str, Any]) -> str:
    """Returns a ratio of pairs, and the range of its middle half where there are several."""
    low, high = measure["spread"]
    several = len(measure["pairs"]) > 1
    return f"{measure['ratio']:.2f}×" + (f" ({low:.2f}–{high:.2f})" if several else "")


def progress_bar() -> Progress:
    """Returns a bar on stderr that disappears when it is done; nothing is shown unless stderr is a terminal."""
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
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner where stderr is a terminal. Yields the callback that names the stage of the work."""
    with errors.status(what, spinner="dots") as status:
        yield lambda stage: status.update(f"{what}: {stage}") if errors.is_terminal else None


@contextmanager
def loading() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar while a model is loaded and kernels are compiled. Yields the callback to pass as `progress`.

    Where stderr is no terminal, one line says that kernels are being compiled, since that may take a minute.
    """
    said = False

    def report(what: str, done: int, total: int) -> None:
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
        yield report


class Interruption:
    """Whether the user has asked to stop."""

    def __init__(self) -> None:
        self.wanted = False


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Records the first Ctrl-C instead of interrupting a step; a second one raises KeyboardInterrupt."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals.
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
    """Returns the acceptance length in words; None where nothing was drafted."""
    if not speculation.drafts:
        return None
    return (
        f"acceptance length {speculation.mean_acceptance_length:.2f} "
        f"({speculation.accepted_tokens} of {speculation.draft_tokens} drafts)"
    )


def summary(outputs: Sequence[RequestOutput], speculation: SpeculationCounts, seconds: float) -> str:
    """Returns the line at the end: tokens, tokens/s, acceptance length, cached prompt tokens."""
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
