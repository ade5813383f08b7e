"""`outrider doctor --memory`: how the memory for the KV cache is divided."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.terminal import loading, out, plain_table
from outrider.config import EngineConfig
from outrider.tools.doctor.findings import bytes_text
from outrider.tools.wording import counted

if TYPE_CHECKING:
    from outrider.tools.doctor.memory import MemoryReport


def show_memory(config: EngineConfig, *, is_default: bool, as_json: bool) -> None:
    """Prints the report. `is_default` means that the drafter is the one `serve` uses where none is named."""
    from outrider.engine.build import build_engine
    from outrider.tools.doctor.memory import look_at_memory

    with loading() as progress:
        report = look_at_memory(build_engine(config, progress=progress))
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report, is_default=is_default)


def _print(report: MemoryReport, *, is_default: bool) -> None:
    drafter = f"{report.drafter} with {counted(report.k, 'draft')} per step" if report.drafter else "no drafter"
    title = f"KV of {report.model}, {drafter}: {bytes_text(report.total_bytes)}"
    out.print(Text(title, style="bold"), soft_wrap=True)
    if is_default:
        out.print(
            f"{report.drafter} is the default drafter of `outrider serve`; --no-speculation shows the memory "
            "without it",
            soft_wrap=True,
        )
    for table in (_groups(report), _per_request(report), _arenas(report)):
        out.print()
        out.print(table)
    out.print()
    out.print(
        f"{counted(report.requests, 'request')} of {report.max_model_len:,} tokens can decode at once; "
        f"{report.tokens:,} tokens of typical texts fit, running or cached.\n"
        f"Retention: {report.retention}; {_hits(report)}",
        soft_wrap=True,
        highlight=False,
    )


def _hits(report: MemoryReport) -> str:
    """Returns a sentence about where a cache hit may end."""
    if all(group.window is None for group in report.groups):
        return "a cache hit may end at any token."
    return f"a cache hit may end at multiples of {report.alignment} tokens, and where a cached prompt ended."


def _groups(report: MemoryReport) -> Table:
    table = plain_table("groups", "group", "layers", "read", "per\ntoken", "page,\ntokens", "page,\nbytes", "arena")
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
    table = plain_table(title, "group", "pages while\nit decodes", "bytes", "cached\nafterwards")
    for group in report.groups:
        table.add_row(
            group.name,
            f"{group.pages_per_request:,}",
            bytes_text(group.bytes_per_request),
            "all" if group.cached_fraction == 1 else f"{group.cached_fraction:.0%}, and ends",
        )
    return table


def _arenas(report: MemoryReport) -> Table:
    table = plain_table("arenas", "arena", "page,\nbytes", "pages", "memory", "pages per\nrequest", "requests")
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
