"""How `outrider doctor` shows what it has found."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from outrider.cli.terminal import out
from outrider.tools.doctor.findings import Finding, Status

STYLES = {Status.OK: ("ok", "green"), Status.NOTE: ("note", "yellow"), Status.PROBLEM: ("problem", "bold red")}


def print_findings(title: str, findings: Sequence[Finding], *, only_trouble: bool = False) -> None:
    """Prints a table of findings; with `only_trouble`, only those that are not in order."""
    if only_trouble:
        findings = [finding for finding in findings if finding.status is not Status.OK]
    if not findings:
        return
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        word, style = STYLES[finding.status]
        text = Text(finding.text)
        if finding.advice is not None:
            text.append(f"\n→ {finding.advice}", style=style)
        table.add_row(Text(word, style=style), finding.name, text)
    out.print(table)
    out.print()
