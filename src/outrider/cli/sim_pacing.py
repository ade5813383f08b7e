"""`outrider sim --pacing`: the table of the pacing campaign."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.cli.terminal import progress_bar
from outrider.tools.sim.pace_campaign import LOADS, SLACK, PaceResult, run_pace_campaign


def show_pacing(console: Console, seeds: Sequence[int], *, processes: int, as_json: bool) -> bool:
    """Runs the campaign and prints its rates. Returns whether no check failed."""
    with progress_bar() as progress:
        task = progress.add_task("runs", total=len(LOADS) * len(seeds))
        results = run_pace_campaign(
            seeds, processes=processes or os.cpu_count() or 1, progress=lambda: progress.advance(task)
        )
    problems = [result for result in results if result.problem is not None]
    if as_json:
        print(json.dumps([result.as_json() for result in results]))
    else:
        console.print(_table(results))
        console.print(
            "Rates are tokens per second. Of best: what the pacer reaches of the best fixed number of drafts, none "
            f"included; at least {SLACK}. Of oracle: what it reaches of one that knows which drafts will be accepted.",
            soft_wrap=True,
        )
        for result in problems:
            console.print(f"[red]seed {result.seed}[/red]: {escape(result.problem or '')}")
    return not problems


def _table(results: Sequence[PaceResult]) -> Table:
    table = Table(title="the pacer on synthetic machines", title_justify="left")
    table.add_column("machine and load", overflow="fold")
    for column in ("seed", "plain", "best fixed", "k", "paced", "oracle", "of best", "of oracle"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        style = "bold red" if result.problem is not None else "green"
        table.add_row(
            escape(result.load),
            str(result.seed),
            f"{result.plain:.1f}",
            f"{result.best_fixed:.1f}",
            str(result.best_k),
            f"{result.paced:.1f}",
            f"{result.oracle:.1f}",
            f"[{style}]{result.ratio:.3f}[/{style}]",
            f"{result.paced / result.oracle:.3f}",
        )
    return table
