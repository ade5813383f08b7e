"""`outrider doctor --memory`: who gets what of the memory for KV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from outrider.api.cli.terminal import loading, out
from outrider.api.cli.wording import counted
from outrider.api.doctor.findings import bytes_text
from outrider.config import EngineConfig

if TYPE_CHECKING:
    from outrider.api.doctor.memory import MemoryReport


def show_memory(config: EngineConfig, *, usual: bool, as_json: bool) -> None:
    """`usual`: nobody named the drafter; it is what `serve` takes."""
    from outrider.api.doctor.memory import look_at_memory
    from outrider.engine.build import build_engine

    with loading() as progress:
        report = look_at_memory(build_engine(config, progress=progress))
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report, usual=usual)


def _print(report: MemoryReport, *, usual: bool) -> None:
    drafter = f"{report.drafter} with {counted(report.k, 'draft')} a step" if report.drafter else "no drafter"
    title = f"KV of {report.model}, {drafter}: {bytes_text(report.total_bytes)}"
    out.print(Text(title, style="bold"), soft_wrap=True)
    if usual:
        out.print(f"{report.drafter} is what `outrider serve` takes; --no-speculation shows it without", soft_wrap=True)
    for table in (_groups(report), _per_request(report), _arenas(report)):
        out.print()
        out.print(table)
    out.print()
    out.print(
        f"{counted(report.requests, 'request')} of {report.max_model_len:,} tokens can decode at once; "
        f"{report.tokens:,} tokens of usual texts fit, running or cached.\n"
        f"Retention: {report.retention}; {_hits(report)}",
        soft_wrap=True,
        highlight=False,
    )


def _hits(report: MemoryReport) -> str:
    """Where a text that is cached in part may be gone on from."""
    if all(group.window is None for group in report.groups):
        return "a cached text is gone on from at any token."
    return f"a cached text is gone on from at multiples of {report.alignment} tokens, and where a cached prompt ended."


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table


def _groups(report: MemoryReport) -> Table:
    table = _table("groups", "group", "layers", "read", "per\ntoken", "page,\ntokens", "page,\nbytes", "arena")
    for group in report.groups:
        table.add_row(
            group.name,
            str(group.layers),
            "all" if group.window is None else f"the last {group.window:,}",
            bytes_text(group.bytes_per_token),
            f"{group.page_tokens:,}",
            f"{group.page_bytes:,}",
            str(group.arena),
        )
    return table


def _per_request(report: MemoryReport) -> Table:
    title = f"a request of {report.max_model_len:,} tokens"
    table = _table(title, "group", "pages while\nit decodes", "bytes", "cached\nafterwards")
    for group in report.groups:
        table.add_row(
            group.name,
            f"{group.pages_per_request:,}",
            bytes_text(group.bytes_per_request),
            "all" if group.cached_share == 1 else f"{group.cached_share:.0%}, and ends",
        )
    return table


def _arenas(report: MemoryReport) -> Table:
    table = _table("arenas", "arena", "page,\nbytes", "pages", "memory", "pages per\nrequest", "requests")
    table.add_column("serves", overflow="fold")
    for arena in report.arenas:
        table.add_row(
            str(arena.number),
            f"{arena.page_bytes:,}",
            f"{arena.pages:,}",
            bytes_text(arena.bytes),
            f"{arena.pages_per_request:,}",
            f"{arena.requests:,}",
            ", ".join(arena.groups),
        )
    return table
