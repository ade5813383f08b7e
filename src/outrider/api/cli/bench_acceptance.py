"""`outrider bench acceptance`: how many drafts are accepted on chats from a file, greedy and sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.api.cli.drafter_options import METHODS, speculation_of
from outrider.api.cli.engine_options import (
    ENGINE,
    SPECULATIVE_EXAMPLE,
    ModelOptions,
    byte_count,
    chosen_model,
    speculative_mapping,
)
from outrider.api.cli.grouped import grouped
from outrider.api.cli.terminal import errors, loading, out, progress_bar
from outrider.api.cli.wording import counted
from outrider.config import EngineConfig

ASKED = "What is asked"
DRAFTER = "Drafter"
PASSES = ("greedy", "sampled")

ACCEPTANCE_HELP = (
    "Measure how many drafts the model accepts, by category.\n\n"
    'FILE has a JSON object per line: {"category": "…", "turns": ["…", "…"]}, or {"prompt": "…"}. Each line is a chat: '
    "its turns are asked in order, a later one after the model's own answers. All chats run greedily, then once more "
    "sampled with a fixed seed. The figures are the same for any --batch.\n\n"
    "[bold]Acceptance length[/bold] is 1 + accepted drafts per step that verified any; [bold]tokens per step[/bold] "
    "also counts the steps at the ends of prompts, which have no drafts to verify yet.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench acceptance --prompts chats.jsonl --method ngram\n\n"
    "  outrider bench acceptance --prompts chats.jsonl --method dflash --limit 4\n\n"
    "  outrider bench acceptance --prompts chats.jsonl --method eagle --drafter ./d"
)
METHOD_HELP = f"{', '.join(METHODS)}."
DRAFTER_HELP = (
    "The drafter's checkpoint: a directory, a hub id or a built-in name. May be left out where one comes with the "
    "model, and for methods without one."
)
K_HELP = "Drafts per step. Default 7 for dflash, 5 for eagle3 and eagle, else 4."


@grouped
def bench_acceptance(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="Chats, one JSON object per line.", rich_help_panel=ASKED)
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=ASKED)] = 256,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Chats of each category, evenly spread over the file. Default: all.",
            show_default=False,
            rich_help_panel=ASKED,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampled pass.", rich_help_panel=ASKED)] = 0.7,
    no_sampled: Annotated[
        bool, typer.Option("--no-sampled", help="Leave the sampled pass out.", rich_help_panel=ASKED)
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Chats at once.", rich_help_panel=ASKED)] = 16,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP, show_default=False, rich_help_panel=DRAFTER)] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_NAME", help=DRAFTER_HELP, show_default=False, rich_help_panel=DRAFTER),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help=K_HELP, show_default=False, rich_help_panel=DRAFTER)
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help=f"The same and further settings as JSON: '{SPECULATIVE_EXAMPLE}'.",
            metavar="JSON",
            show_default=False,
            rich_help_panel=DRAFTER,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest chat. Default: what the model and the memory allow.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="Memory for KV, such as 2G. With less, fewer chats run at once.",
            parser=byte_count,
            metavar="BYTES",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")] = False,
    model: ModelOptions,
) -> None:
    speculation = speculation_of(speculative_mapping(speculative_config), method=method, drafter=drafter, k=k)
    engine_config = EngineConfig(
        **model.settings()
        | {
            "model": chosen_model(positional, model),
            "speculative_config": speculation,
            "max_model_len": max_model_len,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
        }
    )

    from outrider.bench.acceptance import AcceptanceConfig, measure, prepare, read_chats, spread

    config = AcceptanceConfig(
        engine=engine_config,
        max_tokens=max_tokens,
        temperature=None if no_sampled else temperature,
        batch=batch,
    )
    chats = spread(read_chats(prompts), limit)
    with loading() as progress:
        engine = prepare(config, progress=progress)
    turns = sum(len(chat.turns) for chat in chats)
    with progress_bar() as bar:
        tasks = {name: bar.add_task(name, total=turns) for name in config.samplings}
        report = measure(config, engine, chats, lambda name, ended: bar.advance(tasks[name], ended))
    report["config"] |= {"prompts": str(prompts), "limit": limit}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_report(report)


def print_report(report: dict[str, Any]) -> None:
    config, sampled = report["config"], report["sampled"]
    drafts = counted(config["k"], "draft")
    method = config["engine"]["speculative_config"]["method"]
    out.print(
        f"{report['model']}, {drafts} a step by {method}"
        + (f" ({report['drafter']})" if report["drafter"] != method else "")
        + f"; answers of at most {counted(config['max_tokens'], 'token')}",
        soft_wrap=True,
    )
    out.print(
        "greedy" + ("" if sampled is None else f", and sampled at temperature {config['temperature']:g}"), style="dim"
    )
    passes = [(name, report[name]) for name in PASSES if report[name] is not None]
    out.print(Text("\nacceptance by category", style="bold"))
    out.print(_category_table(passes))
    out.print(Text("\naccepted, by position of the draft", style="bold"))
    out.print(_position_table(passes, config["k"]))
    for name, figures in passes:
        cut = figures["all"]["too_long"]
        if cut:
            errors.print(
                Text(
                    f"note: {counted(cut, 'chat')} ended early ({name}): the next turn and its answer did not fit into "
                    f"{config['max_model_len']:,} tokens or the memory for KV; lower --max-tokens, or raise "
                    "--max-model-len or --kv-cache-memory-bytes",
                    style="yellow",
                ),
                soft_wrap=True,
            )


def _category_table(passes: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("category", overflow="fold")
    for heading in ("chats", "turns"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("length", "tokens\nper step", "rate"):
        for name, _figures in passes:
            table.add_column(f"{heading}\n{name}" if "\n" in heading else f"\n{heading}\n{name}", justify="right")
    first = passes[0][1]
    for category in (*first["categories"], "all"):
        counts = first["all"] if category == "all" else first["categories"][category]
        entries = [
            figures["all"] if category == "all" else figures["categories"][category] for _name, figures in passes
        ]
        table.add_row(
            Text(category),
            f"{counts['prompts']:,}",
            f"{counts['turns']:,}",
            *(f"{entry['mean_acceptance_length']:.2f}" for entry in entries),
            *(f"{entry['tokens_per_step']:.2f}" for entry in entries),
            *(f"{entry['acceptance_rate']:.0%}" for entry in entries),
            style="bold" if category == "all" else None,
        )
    return table


def _position_table(passes: list[tuple[str, dict[str, Any]]], k: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for place in range(1, k + 1):
        table.add_column(str(place), justify="right")
    for name, figures in passes:
        table.add_row(name, *(f"{share:.0%}" for share in figures["all"]["accepted_share"]))
    return table
