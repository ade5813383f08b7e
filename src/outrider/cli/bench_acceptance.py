"""`outrider bench acceptance`: how many drafts are accepted on chats from a file, greedy and sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.drafter_options import METHODS, speculation_of
from outrider.cli.engine_options import (
    SPECULATIVE_EXAMPLE,
    AsJson,
    ModelOptions,
    PositionalModel,
    byte_count,
    chosen_model,
    engine_option,
    speculative_mapping,
)
from outrider.cli.grouped import grouped, panel
from outrider.cli.terminal import loading, note, out, progress_bar
from outrider.config import EngineConfig
from outrider.tools.bench.copying import COPYING_NAME, copying_path
from outrider.tools.wording import counted

chat_option = panel("Chats")
drafter_option = panel("Drafter")
PASSES = ("greedy", "sampled")

ACCEPTANCE_HELP = (
    "Measure how many drafts the model accepts, by category.\n\n"
    'FILE has a JSON object per line: {"category": "…", "turns": ["…", "…"]}, or {"prompt": "…"}. Each line is a chat: '
    "its turns are sent in order, each after the model's answer to the one before. All chats run greedily, then once "
    "more sampled with a fixed seed. The figures are the same for any --batch. [bold]--prompts copying[/bold] asks the "
    "requests of this package whose answers copy from the prompt.\n\n"
    "[bold]Acceptance length[/bold] is 1 + the accepted drafts per step with drafts; [bold]tokens per step[/bold] "
    "also counts the last step of each prompt, which has no drafts to verify yet.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench acceptance --prompts chats.jsonl --method ngram\n\n"
    "  outrider bench acceptance --prompts chats.jsonl --method dflash --limit 4\n\n"
    "  outrider bench acceptance --prompts chats.jsonl --method eagle --drafter ./d"
)
METHOD_HELP = f"Method of the drafter: {METHODS}, or a method of an installed package."
DRAFTER_HELP = (
    "The drafter's checkpoint: a directory, a hub id or a built-in name. May be left out where one is installed for "
    "the model, and for methods without one."
)
K_HELP = "Drafts per step. Default 7 for dflash, 5 for eagle3 and eagle, else 4."


@grouped
def bench_acceptance(
    *,
    positional: PositionalModel = None,
    prompts: Annotated[
        Path, chat_option(metavar="FILE", help=f"Chats, one JSON object per line; or the word {COPYING_NAME}.")
    ],
    max_tokens: Annotated[int, chat_option(min=1, help="Longest answer.")] = 256,
    limit: Annotated[
        int | None, chat_option(min=1, help="Chats of each category, evenly spread over the file. Default: all.")
    ] = None,
    temperature: Annotated[float, chat_option(min=0.0, help="Temperature of the sampled pass.")] = 0.7,
    no_sampled: Annotated[bool, chat_option("--no-sampled", help="Skip the sampled pass.")] = False,
    batch: Annotated[int, chat_option(min=1, help="Chats in one batch.")] = 16,
    method: Annotated[str | None, drafter_option(help=METHOD_HELP)] = None,
    drafter: Annotated[str | None, drafter_option(metavar="PATH_OR_NAME", help=DRAFTER_HELP)] = None,
    k: Annotated[int | None, drafter_option("--k", min=1, help=K_HELP)] = None,
    speculative_config: Annotated[
        str | None,
        drafter_option(
            help=f"The options above and further settings as JSON: '{SPECULATIVE_EXAMPLE}'.", metavar="JSON"
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, engine_option(help="Longest chat. Default: what the model and the memory allow.")
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None,
        engine_option(
            help="Memory for the KV cache, such as 2G. With less, fewer chats run at once.",
            parser=byte_count,
            metavar="BYTES",
        ),
    ] = None,
    as_json: AsJson = False,
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

    from outrider.tools.bench.acceptance import AcceptanceConfig, measure, prepare, read_chats, spread

    config = AcceptanceConfig(
        engine=engine_config, max_tokens=max_tokens, temperature=None if no_sampled else temperature, batch=batch
    )
    chats = spread(read_chats(copying_path() if str(prompts) == COPYING_NAME else prompts), limit)
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
        f"{report['model']}, {drafts} per step by {method}"
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
            note(
                f"{counted(cut, 'chat')} ended early ({name}): the next turn and its answer did not fit into "
                f"{config['max_model_len']:,} tokens or the memory for KV; lower --max-tokens, or raise "
                "--max-model-len or --kv-cache-memory-bytes"
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
    for position in range(1, k + 1):
        table.add_column(str(position), justify="right")
    for name, figures in passes:
        table.add_row(name, *(f"{rate:.0%}" for rate in figures["all"]["accepted_share"]))
    return table
