"""`outrider sim --pacing`: the table of the pacing campaign."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.cli.terminal import progress_bar
from outrider.tools.sim.pace_campaign import LOADS, MEAN_SLACK, SLACK, PaceResult, mean_ratio, run_pace_campaign


def show_pacing(console: Console, seeds: Sequence[int], *, processes: int, as_json: bool) -> bool:
    """Runs the campaign and prints its rates. Returns whether no check failed."""
    with progress_bar() as progress:
        task = progress.add_task("runs", total=len(LOADS) * len(seeds))
        results = run_pace_campaign(
            seeds, processes=processes or os.cpu_count() or 1, progress=lambda: progress.advance(task)
        )
    problems = [result for result in results if result.problem is not None]
    reached = mean_ratio(results)
    if as_json:
        print(json.dumps([result.as_json() for result in results]))
    else:
        for seed in seeds:
            console.print(_table(seed, [result for result in results if result.seed == seed]))
        console.print(
            "Rates are tokens per second; best fixed: with the best fixed number of drafts, which is given behind it. "
            f"Of best: what the pacer reaches of that, or of plain if that is more; at least {SLACK}. "
            "Of oracle: what it reaches of one that knows which drafts will be accepted.",
            soft_wrap=True,
        )
        for result in problems:
            console.print(f"[red]seed {result.seed}[/red]: {escape(result.problem or '')}")
        style = "green" if reached >= MEAN_SLACK else "bold red"
        console.print(
            f"On average the pacer reaches [{style}]{reached:.3f}[/{style}] of the best, where more than all of it "
            f"counts as all; it must reach {MEAN_SLACK}.",
            soft_wrap=True,
        )
    return not problems and reached >= MEAN_SLACK


def _table(seed: int, results: Sequence[PaceResult]) -> Table:
    table = Table(title=f"the pacer on synthetic machines, seed {seed}", title_justify="left", box=None)
    table.padding = (0, 2, 0, 0)
    table.add_column("machine and load", no_wrap=True)
    for column in ("plain", "best fixed", "paced", "of best", "of oracle"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        style = "bold red" if result.problem is not None else "green"
        table.add_row(
            escape(result.load),
            f"{result.plain:.1f}",
            f"{result.best_fixed:.1f} ({result.best_k})",
            f"{result.paced:.1f}",
            f"[{style}]{result.ratio:.3f}[/{style}]",
            f"{result.paced / result.oracle:.3f}",
        )
    return table
