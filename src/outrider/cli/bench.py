"""`outrider bench`: one command for each kind of measurement; `bench kv` is in this file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.bench_acceptance import ACCEPTANCE_HELP, bench_acceptance
from outrider.cli.bench_cluster import CLUSTER_BENCH_HELP, bench_cluster
from outrider.cli.bench_decode import DECODE_HELP, bench_decode
from outrider.cli.bench_prefix import PREFIX_HELP, bench_prefix
from outrider.cli.bench_serve import SERVE_BENCH_HELP, bench_serve
from outrider.cli.bench_tiers import STORE_HELP, TIERS_HELP, bench_store, bench_tiers
from outrider.cli.bench_transfer import TRANSFER_HELP, bench_transfer
from outrider.cli.engine_options import AsJson
from outrider.cli.terminal import note, progress_bar
from outrider.kv.archetypes import ARCHETYPES
from outrider.speculative.registry import BUILT_IN
from outrider.tools.bench.busy import how_busy
from outrider.tools.bench.kv import REFERENCE_SOURCE, KVBenchConfig, Workload, measure
from outrider.tools.bench.kv_windows import measure_windows
from outrider.tools.doctor.findings import bytes_text
from outrider.tools.wording import counted

DEFAULT_REPEATS = 5
DEFAULT_REQUESTS = 1000
QUICK_REPEATS = 1
REFERENCE_METHOD = "chain_from_taps"
QUICK_REQUESTS = 512

bench_app = typer.Typer(
    help="Measure generation speed, acceptance of drafts, prefix-cache hits, and what HTTP, the scheduler, the KV core "
    "and hand-offs between workers cost.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


bench_app.command("decode", help=DECODE_HELP)(bench_decode)
bench_app.command("acceptance", help=ACCEPTANCE_HELP)(bench_acceptance)
bench_app.command("prefix", help=PREFIX_HELP)(bench_prefix)
bench_app.command("tiers", help=TIERS_HELP)(bench_tiers)
bench_app.command("store", help=STORE_HELP)(bench_store)
bench_app.command("serve", help=SERVE_BENCH_HELP)(bench_serve)
bench_app.command("cluster", help=CLUSTER_BENCH_HELP)(bench_cluster)
bench_app.command("transfer", help=TRANSFER_HELP)(bench_transfer)


# Given as text, since typer would keep the line breaks of a docstring.
KV_HELP = (
    "Measure the scheduler and the KV core.\n\n"
    "Serves 1,000 requests of 1,024 prompt tokens that share their first 512, on pages of 16, and generates "
    "64 tokens for each. No model runs: which drafts are accepted is made up. Reports the time that the scheduler "
    "and the KV "
    "core take per [bold]request-step[/bold] (one request in one step), how it grows with more requests and "
    "more cached pages, and what one prompt of 32,768 tokens costs; then the same for models with sliding-window "
    "layers, next to a model without, and the KV memory that a text of 8,192 tokens holds there while it decodes."
)


@bench_app.command("kv", help=KV_HELP)
def bench_kv(
    as_json: AsJson = False,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds. Each measures everything once; the median is reported. "
            f"Default {DEFAULT_REPEATS}, with --quick {QUICK_REPEATS}.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round with fewer requests: seconds, but noisier figures.")
    ] = False,
    method: Annotated[
        str,
        typer.Option(
            help=f"Drafting method whose KV needs are served: {', '.join(BUILT_IN)}; or a way of treating KV: "
            f"{', '.join(ARCHETYPES)}; or none."
        ),
    ] = REFERENCE_METHOD,
    k: Annotated[int, typer.Option("--k", min=0, help="Draft tokens per step; half are accepted.")] = 4,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Requests to serve. Default {DEFAULT_REQUESTS}, with --quick {QUICK_REQUESTS}.",
            show_default=False,
        ),
    ] = None,
    running: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 256,
) -> None:
    workload = Workload(
        method=method, k=k, requests=requests or (QUICK_REQUESTS if quick else DEFAULT_REQUESTS), running=running
    )
    config = KVBenchConfig(workload=workload, repeats=repeats or (QUICK_REPEATS if quick else DEFAULT_REPEATS))
    busy = how_busy()
    note(busy)
    with _progress(config.measurements + config.repeats) as report_progress:
        report = measure(config, report_progress).to_json()
        report["windows"] = measure_windows(
            method, k, prompt_tokens=config.lookup_tokens, rounds=config.repeats, progress=report_progress
        ).to_json()
    report["busy"] = busy
    if workload != Workload(method=REFERENCE_METHOD):
        # The reference was measured with the default workload; next to another one its figures mean nothing.
        report["reference"] = None
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_tables(report)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a bar on stderr. Yields the callback to call before each measurement."""
    with progress_bar() as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def report_progress(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            begun += 1

        yield report_progress


SERVING = (
    ("us_per_request_step", "all steps"),
    ("us_per_request_step_pure_decode", "pure decoding steps"),
    ("us_per_request_step_without_speculation", "without speculation"),
)
LOOKUP = (
    ("hash_ms", "hash"),
    ("miss_ms", "search, not cached"),
    ("hit_ms", "search, cached"),
    ("allocate_ms", "allocate"),
    ("total_fresh_ms", "total, not cached"),
    ("total_cached_ms", "total, cached"),
)
STAGES = (
    ("miss_ms", "hash,\nsearch"),
    ("keep_ms", "publish,\nfree"),
    ("hit_ms", "search,\ncached"),
    ("shared_ms", "search,\n3/4 shared"),
    ("total_ms", "total"),
)


def _print_tables(report: dict[str, Any]) -> None:
    console, config = Console(), report["config"]
    workload, repeats = config["workload"], config["repeats"]
    console.print(
        f"{counted(workload['requests'], 'request')}, {workload['running']:,} at once, "
        f"{counted(workload['k'], 'draft')} ({workload['method']}); "
        + (f"medians of {repeats} rounds" if repeats > 1 else "one round")
    )
    console.print(_compared("Time per request-step", SERVING, "µs", report, report["best"], report))
    lookup, best_lookup = report["lookup_32k_ms"], report["best"]["lookup_32k_ms"]
    title = f"One prompt of {config['lookup_tokens']:,} tokens"
    console.print(_compared(title, LOOKUP, "ms", lookup, best_lookup, report))
    console.print(_scaling(report))
    console.print(_long_prompt(report["windows"]))
    console.print(_held(report["windows"]))
    console.print(
        f"{report['steps_per_second']:.0f} steps per second. Peak memory {report['peak_rss_main_mb']:.0f} MB "
        f"while serving, {report['peak_rss_mb']:.0f} MB with scaling."
    )
    if report["reference"] is not None:
        console.print(f"* {REFERENCE_SOURCE}.")
    else:
        console.print("No reference: it was measured with the default workload only.")


def _compared(
    title: str,
    rows: tuple[tuple[str, str], ...],
    unit: str,
    figures: dict[str, float],
    best: dict[str, float],
    report: dict[str, Any],
) -> Table:
    """Returns a table of our figures next to those of the reference, where there is one."""
    compared = report["reference"]
    table = Table(title=f"{title}, {unit}", title_justify="left")
    table.add_column("")
    for heading in ("median", "best", *(("reference*", "median / reference") if compared else ())):
        table.add_column(heading, justify="right")
    for name, label in rows:
        cells = [label, f"{figures[name]:.2f}", f"{best[name]:.2f}"]
        if compared and name in compared["figures"]:
            cells += [f"{compared['figures'][name]:.1f}", f"{compared['ours_to_reference'][name]:.2f}"]
        table.add_row(*cells)
    return table


def _scaling(report: dict[str, Any]) -> Table:
    table = Table(
        title="Scaling, µs per request-step",
        title_justify="left",
        caption=f"At most {report['scaling_ratio_max']:.2f} times the first row.",
        caption_justify="left",
    )
    for heading in ("running", "pages cached before", "median", "best"):
        table.add_column(heading, justify="right")
    for entry, best in zip(report["scaling"], report["best"]["scaling"], strict=True):
        table.add_row(
            f"{entry['running']:,}",
            f"{entry['cached_pages']:,}",
            f"{entry['us_per_request_step']:.2f}",
            f"{best['us_per_request_step']:.2f}",
        )
    return table


def _long_prompt(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"Windows: one prompt of {report['prompt_tokens']:,} tokens, relative to a model without windows",
        title_justify="left",
        caption=f"5:1 means five layers with a window to one without. Total: at most {report['ratio_max']:.2f} "
        "times plain.",
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
        caption="least possible: all positions of full layers, one window and one page of the others.",
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
