"""The part of `outrider bench kv` about models with windows."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.api.doctor.findings import bytes_text

STAGES = (
    ("miss_ms", "hash,\nsearch"),
    ("keep_ms", "publish,\nfree"),
    ("hit_ms", "search,\ncached"),
    ("shared_ms", "search,\n3/4 shared"),
    ("total_ms", "all"),
)


def print_windows(console: Console, report: dict[str, Any]) -> None:
    console.print(_long_prompt(report))
    console.print(_held(report))


def _long_prompt(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"Windows: one prompt of {report['prompt_tokens']:,} tokens, against one without windows",
        title_justify="left",
        caption=f"5:1: five layers with a window to one without. At most {report['ratio_max']:.2f} times plain in all.",
        caption_justify="left",
    )
    table.add_column("")
    for _name, heading in STAGES:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["long_prompt"]:
        plain = row["against"] is None
        cells = [f"{row[name]:.2f} ms" if plain else f"× {row[f'{name}_ratio']:.2f}" for name, _heading in STAGES]
        table.add_row(row["case"], *cells)
    return table


def _held(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"Windows: target KV of one text that decodes past {report['context_tokens']:,} tokens",
        title_justify="left",
        caption="least possible: all positions of full layers, a window and one page of the others.",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("drafts", "held, most", "least possible", "ratio", "without windows"):
        table.add_column(heading, justify="right")
    for row in report["held"]:
        table.add_row(
            row["layout"],
            str(row["k"]),
            bytes_text(row["most_bytes"]),
            bytes_text(row["least_possible_bytes"]),
            f"{row['ratio']:.3f}",
            bytes_text(row["plain_bytes"]),
        )
    return table
