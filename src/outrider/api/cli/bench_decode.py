"""`outrider bench decode`: tokens per second, with and without speculation, beside Transformers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.api.cli.engine_options import (
    ENGINE,
    SPECULATIVE_EXAMPLE,
    ModelOptions,
    chosen_model,
    packaged_speculations,
    speculative_mapping,
)
from outrider.api.cli.grouped import grouped
from outrider.api.cli.terminal import errors, loading, out, progress_bar
from outrider.config import EngineConfig, SpeculativeConfig

FIXED_DRAFTS = (3, 4, 5)
DEFAULT_BATCHES = (1, 8)
DEFAULT_TOKENS, DEFAULT_ROUNDS = 128, 5
QUICK_TOKENS, QUICK_ROUNDS = 32, 2
MEASURED = "What is measured"

DECODE_HELP = (
    "Measure how fast text is generated.\n\n"
    "Outrider without speculation and with every drafter that is there for the model (the first of them also with "
    f"fixed numbers of drafts: {', '.join(map(str, FIXED_DRAFTS))}), on ordinary and on "
    "repetitive text and on chats; beside it Transformers with the same weights, plain and with its prompt "
    "look-up. All in one process, in turns, on the same number of cores; medians over the rounds. Greedy and past "
    "end-of-text, so that all generate the same number of tokens, which are compared.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench decode\n\n"
    "  outrider bench decode --quick --batch 1\n\n"
    "  outrider bench decode --prompt-tokens 512 --tokens 64 --json"
)


@grouped
def bench_decode(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Requests at once; may be repeated. Default 1 and 8.",
            show_default=False,
            rich_help_panel=MEASURED,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.", rich_help_panel=MEASURED)] = 64,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Tokens to generate for each. Default {DEFAULT_TOKENS}, with --quick {QUICK_TOKENS}.",
            show_default=False,
            rich_help_panel=MEASURED,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"How often everything runs. Default {DEFAULT_ROUNDS}, with --quick {QUICK_ROUNDS}.",
            show_default=False,
            rich_help_panel=MEASURED,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer tokens and rounds: sooner, but noisier.", rich_help_panel=MEASURED),
    ] = False,
    speculative_config: Annotated[
        list[str] | None,
        typer.Option(
            help=f"How to draft, as JSON; may be repeated. Default: '{SPECULATIVE_EXAMPLE}' and, for a model that "
            "comes with drafters, those.",
            metavar="JSON",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")] = False,
    model: ModelOptions,
) -> None:
    engine = EngineConfig(**(model.settings() | {"model": chosen_model(positional, model)}))
    packaged = packaged_speculations(engine.model)
    # As users run it by default, and with fixed numbers of drafts beside it: which is best depends on the text.
    fixed = [
        json.dumps(json.loads(text) | {"num_speculative_tokens": drafts})
        for text in packaged[:1]
        for drafts in FIXED_DRAFTS
    ]
    given = [*packaged, *fixed, SPECULATIVE_EXAMPLE]
    speculations = [SpeculativeConfig.of(speculative_mapping(text)) for text in speculative_config or given]

    from outrider.bench.busy import OF_THREADS, how_busy
    from outrider.bench.decode import DecodeBenchConfig, measure, measurements, prepare

    busy = how_busy(OF_THREADS)
    config = DecodeBenchConfig(
        engine=engine,
        speculations=tuple(dict.fromkeys(each for each in speculations if each is not None)),
        batches=tuple(dict.fromkeys(batch or DEFAULT_BATCHES)),
        prompt_tokens=prompt_tokens,
        tokens=tokens or (QUICK_TOKENS if quick else DEFAULT_TOKENS),
        rounds=rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
    )
    with loading() as progress:
        arena = prepare(config, progress=progress)
    if arena.note is not None:
        errors.print(Text(f"note: {arena.note}; only Outrider is measured", style="yellow"), soft_wrap=True)
    if busy is not None:
        errors.print(Text(f"note: {busy}", style="yellow"), soft_wrap=True)
    with progress_bar() as bar:
        task = bar.add_task("", total=measurements(config, arena))
        begun, shown = 0, ["nothing yet"]

        def told(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            if not errors.is_terminal and not what.startswith(shown[-1]):
                # Whoever reads a file later, or waits at a pipe, is told once a round.
                shown.append(what.split(":")[0])
                errors.print(f"{shown[-1]} …")
            begun += 1

        report = measure(config, arena, told) | {"busy": busy}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_report(report)


def print_report(report: dict[str, Any]) -> None:
    config = report["config"]
    rounds, threads = config["rounds"], config["num_threads"]
    out.print(
        f"{report['model']}, {report['dtype']}, {report['kernels']}, {threads} thread{'s' * (threads > 1)}: "
        f"{config['tokens']} tokens after {config['prompt_tokens']}, "
        + (f"medians of {rounds} rounds" if rounds > 1 else "one round")
    )
    compared = any(entry["ratio"] is not None for case in report["cases"] for entry in case["contestants"].values())
    for case in report["cases"]:
        out.print(_case_table(case, compared=compared))
    _print_agreement(report, compared=compared)
    shares = {name: share for name, share in report["draft_kv_share"].items() if share}
    if shares:
        # Fixed numbers of drafts change nothing about it.
        by_method = {name.split(", ")[1]: share for name, share in shares.items()}
        told = ", ".join(f"{share:.1%} with {method}" for method, share in by_method.items())
        out.print(f"Draft KV, as a share of the target's: {told}.", soft_wrap=True)
    memory = dict(report["memory_mb"])
    peak = memory.pop("peak")
    resident = ", ".join(f"{megabytes:,.0f} MB with {name}" for name, megabytes in memory.items())
    out.print(f"Memory: {resident}; peak {peak:,.0f} MB.", soft_wrap=True)


def _case_table(case: dict[str, Any], *, compared: bool) -> Table:
    table = Table(
        title=f"\nbatch {case['batch']}, {case['text']} text",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    headings = ["tokens/s", "step, ms", "tokens\nper step", "against\nplain"]
    for heading in headings + (["against\nTransformers"] if compared else []):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, entry in case["contestants"].items():
        row = [
            f"{entry['tokens_per_s']:.1f}",
            f"{entry['step_ms']:.1f}",
            f"{entry['tokens_per_step']:.2f}",
            f"{entry['ratio_to_plain']:.2f}×",
        ]
        if compared:
            row.append(f"{entry['ratio']:.2f}×")
        table.add_row(name, *row)
    return table


def _print_agreement(report: dict[str, Any], *, compared: bool) -> None:
    entries = [entry for case in report["cases"] for entry in case["contestants"].values()]
    texts, differ, ties = (
        sum(entry[name] for entry in entries) for name in ("texts", "texts_that_differ", "at_a_proven_tie")
    )
    whose = "those of Transformers" if compared else "those without speculation"
    line = f"\nTokens are {whose} in {texts - differ} of {texts} texts"
    if differ:
        line += f"; of the {differ} others {ties} part at a proven tie"
    out.print(Text(f"{line}.", style="red" if differ > ties else "green"))
