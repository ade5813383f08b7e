"""`outrider bench prefix`: prefix-cache hits of conversations, with every drafter and without."""

from __future__ import annotations

import json
from itertools import chain, groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.engine_options import (
    AsJson,
    ModelOptions,
    PositionalModel,
    SpeculativeConfigs,
    chosen_model,
    engine_option,
    packaged_speculations,
    speculative_mapping,
)
from outrider.cli.grouped import grouped, panel
from outrider.cli.terminal import errors, note, out, plain_table
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.speculative.registry import drafting_method
from outrider.tools.wording import counted

if TYPE_CHECKING:
    from outrider.tools.bench.prefix import Row

measured_option = panel("What is measured")

PREFIX_HELP = (
    "Measure the prefix-cache hits of conversations.\n\n"
    "Conversations with one system prompt run one after the other, turn by turn; every turn sends the whole "
    "conversation so far. Small random models with and without sliding windows are served with a random drafter of "
    "every kind (its drafts corrected in part, so that some are accepted), and a real model with the drafters that are "
    "installed for it. A drafter must not change a single hit: the hits of every turn are compared with those without "
    "a drafter.\n\n"
    "Exit status: 0 if hits and answers are the same with every drafter, 1 if not, 2 if the options are wrong."
    "\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench prefix\n\n"
    "  outrider bench prefix --no-model --conversations 5\n\n"
    "  outrider bench prefix --no-random --model ./model --kv-retention tail --json"
)

FOUR_FROM_LOOK_UP = '{"method": "ngram", "num_speculative_tokens": 4}'


@grouped
def bench_prefix(
    *,
    positional: PositionalModel = None,
    conversations: Annotated[int, measured_option(min=1, help="Number of conversations.")] = 20,
    turns: Annotated[int, measured_option(min=1, help="Turns of each conversation.")] = 6,
    answer_tokens: Annotated[int, measured_option(min=1, help="Length of each answer.")] = 12,
    no_random: Annotated[bool, measured_option("--no-random", help="Skip the random models.")] = False,
    no_model: Annotated[bool, measured_option("--no-model", help="Skip the real model.")] = False,
    kv_retention: Annotated[
        str,
        engine_option(
            help="Where a cached text can be hit in a real model with sliding-window layers: dense, tail, or every N "
            "tokens.",
            metavar="POLICY",
        ),
    ] = "dense",
    speculative_config: SpeculativeConfigs = None,
    as_json: AsJson = False,
    model: ModelOptions,
) -> None:
    if no_random and no_model:
        raise ConfigError("--no-random and --no-model leave nothing to measure; give one of them")
    if no_model and speculative_config:
        raise ConfigError("--speculative-config is for the real model, which --no-model skips; give one of them")
    engine = EngineConfig(
        **(model.settings() | {"model": chosen_model(positional, model), "kv_retention": kv_retention})
    )
    given = speculative_config or [*packaged_speculations(engine.model), FOUR_FROM_LOOK_UP]
    speculations = [SpeculativeConfig.of(speculative_mapping(text)) for text in given]
    drafters = [each for each in speculations if each is not None]
    for drafter in drafters:
        # A mistake is told before the random models have run for minutes.
        drafting_method(drafter.method).check_options(drafter)

    from outrider.tools.bench.busy import how_busy
    from outrider.tools.bench.prefix import PrefixBenchConfig, model_rows, random_rows, report_of

    busy = how_busy()
    note(busy and f"{busy}; this does not affect hits and answers")
    config = PrefixBenchConfig(conversations=conversations, turns=turns, answer_tokens=answer_tokens)
    with errors.status("conversing", spinner="dots") as status:

        def report_progress(what: str) -> None:
            if errors.is_terminal:
                status.update(what)

        rows = list(
            chain(
                () if no_random else random_rows(config, report_progress),
                () if no_model else model_rows(config, engine, drafters, report_progress),
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
    hits = "the same hits" if report["identical_hits"] else "DIFFERENT HITS"
    answers = "the same answers" if report["identical_answers"] else "DIFFERENT ANSWERS"
    out.print(Text(f"{hits} and {answers} with every drafter as without", style="green" if good else "bold red"))


def _table(title: str, entries: list[tuple[Row, dict[str, Any]]]) -> Table:
    headings = ("hit\ntokens", "recomputed\ntokens", "hit\nrate", "first\ntoken, ms", "acceptance\nlength")
    table = plain_table(title, "drafter", *headings, "turns with\ndifferent hits")
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
