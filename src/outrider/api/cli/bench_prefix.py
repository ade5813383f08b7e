"""`outrider bench prefix`: what conversations find in the prefix cache, with every drafter and without."""

from __future__ import annotations

import json
from itertools import chain, groupby
from typing import TYPE_CHECKING, Annotated, Any

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
from outrider.api.cli.terminal import errors, out
from outrider.api.cli.wording import counted
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.prefix import Row

MEASURED = "What is measured"

PREFIX_HELP = (
    "Measure what conversations find in the prefix cache.\n\n"
    "Conversations with one system prompt run one after the other, turn by turn; every turn sends all that was said. "
    "Small random models with and without windows are served with a random drafter of every kind (its drafts "
    "corrected in part, so that some are accepted), and a real model with the drafters that are there for it. A "
    "drafter must not change a single hit: rows with and without are compared turn by turn.\n\n"
    "Exit status: 0 if hits and answers are the same with every drafter, 1 if not, 2 if the command was called "
    "wrongly.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench prefix\n\n"
    "  outrider bench prefix --no-model --conversations 5\n\n"
    "  outrider bench prefix --no-random --model ./model --kv-retention tail --json"
)


@grouped
def bench_prefix(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations.", rich_help_panel=MEASURED)] = 20,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.", rich_help_panel=MEASURED)] = 6,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.", rich_help_panel=MEASURED)] = 12,
    no_random: Annotated[
        bool, typer.Option("--no-random", help="Leave the random models out.", rich_help_panel=MEASURED)
    ] = False,
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Leave the real model out.", rich_help_panel=MEASURED)
    ] = False,
    kv_retention: Annotated[
        str,
        typer.Option(
            help="What the real model's cache keeps of layers with a window: dense, tail, or a number: every so many "
            "tokens.",
            metavar="POLICY",
            rich_help_panel=ENGINE,
        ),
    ] = "dense",
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
    if no_random and no_model:
        raise ConfigError("--no-random and --no-model together leave nothing to measure; give one of them")
    engine = EngineConfig(
        **(model.settings() | {"model": chosen_model(positional, model), "kv_retention": kv_retention})
    )
    given = speculative_config or [*packaged_speculations(engine.model), SPECULATIVE_EXAMPLE]
    speculations = [SpeculativeConfig.of(speculative_mapping(text)) for text in given]

    from outrider.bench.busy import how_busy
    from outrider.bench.prefix import PrefixBenchConfig, model_rows, random_rows, report_of

    busy = how_busy()
    if busy is not None:
        errors.print(Text(f"note: {busy}; hits and answers do not depend on it", style="yellow"), soft_wrap=True)
    config = PrefixBenchConfig(conversations=conversations, turns=turns, answer_tokens=answer_tokens)
    with errors.status("conversing", spinner="dots") as status:

        def told(what: str) -> None:
            if errors.is_terminal:
                status.update(what)

        drafters = [each for each in speculations if each is not None]
        rows = list(
            chain(
                () if no_random else random_rows(config, told),
                () if no_model else model_rows(config, engine, drafters, told),
            )
        )
    report = report_of(config, rows) | {"busy": busy}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report, rows)
    if not (report["identical_hits"] and report["identical_answers"]):
        raise typer.Exit(1)


def _print(report: dict[str, Any], rows: list[Row]) -> None:
    sizes = f"{counted(report['conversations'], 'conversation')} of {counted(report['turns'], 'turn')}"
    out.print(Text(f"{sizes}, one at a time", style="bold"))
    entries = list(zip(rows, report["rows"], strict=True))
    for title, found in groupby(entries, key=lambda entry: f"{entry[0].model}; retention {entry[0].retention}"):
        out.print()
        out.print(_table(title, list(found)))
    out.print()
    good = report["identical_hits"] and report["identical_answers"]
    hits = "the same hits" if report["identical_hits"] else "OTHER HITS"
    answers = "the same answers" if report["identical_answers"] else "OTHER ANSWERS"
    out.print(Text(f"with every drafter {hits} and {answers} as without", style="green" if good else "bold red"))


def _table(title: str, entries: list[tuple[Row, dict[str, Any]]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for heading in (
        "hit\ntokens",
        "computed\nagain",
        "hit\nshare",
        "first\ntoken, ms",
        "accepted\nlength",
        "turns with\nother hits",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, entry in entries:
        table.add_row(
            row.drafter,
            f"{entry['hit_tokens']:,}",
            f"{entry['recomputed_tokens']:,}",
            f"{entry['hit_share']:.1%}",
            f"{entry['time_to_first_token_ms']:.1f}",
            f"{entry['mean_acceptance_length']:.2f}",
            str(entry["turns_with_other_hits"]),
            style="red" if row.different_hits or row.different_answers else None,
        )
    return table
