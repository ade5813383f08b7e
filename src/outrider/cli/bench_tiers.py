"""`outrider bench tiers` and `outrider bench store`: what lies behind the KV cache, and what it brings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

from outrider.cli.drafter_options import NoSpeculation, with_default_speculation
from outrider.cli.engine_options import (
    AsJson,
    EngineOptions,
    ModelOptions,
    PositionalModel,
    chosen_model,
    engine_config,
)
from outrider.cli.grouped import grouped, panel
from outrider.cli.terminal import errors, note, out, plain_table

measured_option = panel("What is measured")
DEVICE_BYTES, HOST_GIB = 64 << 20, 1.0
"""Sizes that are compared where none are given."""

TIERS_HELP = (
    "Measure what memory of the host behind a small KV cache brings.\n\n"
    "Conversations take turns, so that each one comes back when the others have used the cache. Hits and times to "
    "first token with the small cache alone are compared with those with memory of the host behind it; the answers "
    "must be the same. --kv-cache-memory-bytes (64M if it is not given) and --kv-offloading-size (1) set the sizes.\n\n"
    "Exit status: 0 if the answers are the same, 1 if not, 2 if the options are wrong.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench tiers\n\n"
    "  outrider bench tiers --conversations 40 --kv-offloading-size 2 --json"
)
STORE_HELP = (
    "Measure a Mooncake Store that two workers share, and break it.\n\n"
    "One worker computes prompts, and the other one finds them in the store; its time to first token is compared with "
    "that of a worker without the store. Then the master and a node are killed and restarted, and values are damaged: "
    "every text must stay right. Everything runs in a network namespace of its own, since Mooncake listens on all "
    "interfaces.\n\n"
    "Exit status: 0 if every text was right and the store came back each time, 1 if not, 2 if the options are wrong or "
    "the store cannot be used here.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench store\n\n"
    "  outrider bench store --sanitizer raise --sanitizer-level bytes --json"
)


@grouped
def bench_tiers(
    *,
    positional: PositionalModel = None,
    conversations: Annotated[int, measured_option(min=1, help="Number of conversations.")] = 20,
    turns: Annotated[int, measured_option(min=1, help="Turns of each conversation.")] = 6,
    answer_tokens: Annotated[int, measured_option(min=1, help="Length of each answer.")] = 24,
    no_speculation: NoSpeculation = False,
    as_json: AsJson = False,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    name = chosen_model(positional, model)
    config = engine_config(name, model, with_default_speculation(engine, name, no_speculation=no_speculation))

    from outrider.tools.bench.busy import how_busy
    from outrider.tools.bench.tiers import TierBenchConfig, measure, report_of

    busy = how_busy()
    note(busy)
    bench = TierBenchConfig(
        conversations=conversations,
        turns=turns,
        answer_tokens=answer_tokens,
        device_bytes=config.kv_cache_memory_bytes or DEVICE_BYTES,
        host_gib=config.kv_offloading_size or HOST_GIB,
    )
    with _status() as progress:
        rows = list(measure(bench, config, progress))
    report = report_of(bench, rows) | {"busy": busy}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_tiers(report)
    if not report["identical_answers"]:
        raise typer.Exit(1)


def _print_tiers(report: dict[str, Any]) -> None:
    headings = ("hit\ntokens", "hit\nrate", "median\nms", "mean\nms", "p90\nms", "acceptance\nlength")
    title = f"{report['conversations']} conversations of {report['turns']} turns; times to first token"
    table = plain_table(title, "memory for KV", *headings)
    for row in report["rows"]:
        times = row["first_token_ms"]
        table.add_row(
            row["name"],
            f"{row['hit_tokens']:,}",
            f"{row['hit_share']:.1%}",
            *(f"{times[each]:.1f}" for each in ("median", "mean", "p90")),
            f"{row['mean_acceptance_length']:.2f}",
        )
    out.print(table)
    tier = report["rows"][-1]["tier"]
    out.print(
        f"pages: {tier['stored']:,} stored, {tier['loaded']:,} loaded, {tier['missed']:,} missed, "
        f"{tier['refused']:,} refused"
    )
    good = report["identical_answers"]
    out.print(Text("the same answers" if good else "DIFFERENT ANSWERS", style="green" if good else "bold red"))


@grouped
def bench_store(
    *,
    positional: PositionalModel = None,
    prompts: Annotated[int, measured_option(min=1, help="Number of prompts.")] = 8,
    prompt_tokens: Annotated[int, measured_option(min=16, help="Length of each prompt.")] = 400,
    answer_tokens: Annotated[int, measured_option(min=1, help="Length of each answer.")] = 24,
    no_speculation: NoSpeculation = False,
    as_json: AsJson = False,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    from outrider.tools.own_network import in_own_network, is_own_network

    name = chosen_model(positional, model)
    config = engine_config(name, model, with_default_speculation(engine, name, no_speculation=no_speculation))
    if not is_own_network():
        raise typer.Exit(subprocess.run(in_own_network([sys.executable, *sys.argv]), check=False).returncode)

    from outrider.tools.bench.busy import how_busy
    from outrider.tools.bench.store import StoreBenchConfig, measure

    busy = how_busy()
    note(busy)
    bench = StoreBenchConfig(prompts=prompts, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
    with _status() as progress:
        report = measure(bench, config, progress) | {"busy": busy}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_store(report)
    if not report["healthy"]:
        raise typer.Exit(1)


def _print_store(report: dict[str, Any]) -> None:
    headings = ("hit\ntokens", "first\ntoken", "pages\nfound", "\nloaded", "\nmissed", "\nrefused")
    title = f"{report['prompts']} prompts of {report['prompt_tokens']} tokens on the second worker"
    table = plain_table(title, "", *headings, "wrong\ntexts")
    for phase in report["phases"]:
        counters = [str(phase["counters"].get(each, "")) for each in ("found", "loaded", "missed", "refused")]
        cells = (f"{phase['hit_tokens']:,}", f"{phase['first_token_ms']:.0f} ms", *counters, str(phase["wrong_texts"]))
        table.add_row(phase["name"], *cells, style="red" if phase["wrong_texts"] else None)
    out.print(table)
    for violation in report["violations"]:
        out.print(Text(violation, style="red"), soft_wrap=True)
    good = report["healthy"]
    verdict = "every text is right, and the store came back each time" if good else "NOT as it should be"
    out.print(Text(verdict, style="green" if good else "bold red"))


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    with errors.status("starting", spinner="dots") as status:

        def progress(what: str) -> None:
            if errors.is_terminal:
                status.update(what)

        yield progress
