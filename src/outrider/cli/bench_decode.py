"""`outrider bench decode`: tokens per second, with and without speculation, next to Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.engine_options import (
    SPECULATIVE_EXAMPLE,
    AsJson,
    ModelOptions,
    PositionalModel,
    SpeculativeConfigs,
    chosen_model,
    packaged_speculations,
    speculative_mapping,
)
from outrider.cli.grouped import grouped, panel
from outrider.cli.terminal import errors, loading, note, out, plain_table, progress_bar, ratio_text
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.tools.number_lists import whole_numbers

FIXED_DRAFTS = "1,3,5"
DEFAULT_BATCHES = "1,8"
DEFAULT_TOKENS, DEFAULT_ROUNDS = 128, 5
QUICK_TOKENS, QUICK_ROUNDS = 32, 2
KINDS = ("ordinary", "repetitive", "chat", "copying")
measured_option = panel("What is measured")

DECODE_HELP = (
    "Measure how fast text is generated.\n\n"
    "Runs Outrider without speculation and with every drafter that is installed for the model (the first of them also "
    f"with fixed numbers of drafts: {FIXED_DRAFTS}), on ordinary text, repetitive text, chats and requests whose "
    "answers copy from the prompt; then Transformers with the same weights, plain and with its prompt look-up. All run "
    "in turns in one process, on the same number of cores, greedily and past the end-of-text token, so that all "
    "generate the same number of tokens. The tokens are compared. Speeds are medians over the rounds, of decoding "
    "alone; prompts are timed by themselves.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench decode\n\n"
    "  outrider bench decode --quick --batch 1\n\n"
    "  outrider bench decode --batch 1,2,4,8,16,32 --no-reference --plot decode.svg\n\n"
    "  outrider bench decode --prompt-tokens 512 --tokens 64 --json"
)


@grouped
def bench_decode(
    *,
    positional: PositionalModel = None,
    batch: Annotated[
        list[str] | None,
        measured_option(help=f"Batch sizes; may be repeated. Default {DEFAULT_BATCHES}.", metavar="N,N,…"),
    ] = None,
    fixed_drafts: Annotated[
        str | None,
        measured_option(
            "--k",
            help="Fixed numbers of drafts with which the first drafter also runs; it chooses the number itself "
            f"otherwise. Default {FIXED_DRAFTS}, but none with --speculative-config.",
            metavar="K,K,…",
        ),
    ] = None,
    text: Annotated[
        str | None, measured_option(help=f"Kinds of prompts, of {', '.join(KINDS)}. Default: all.", metavar="KIND,…")
    ] = None,
    no_reference: Annotated[
        bool, measured_option("--no-reference", help="Leave Transformers out: sooner, and with less memory.")
    ] = False,
    plot: Annotated[
        Path | None,
        measured_option(help="Draw tokens/s over the batch size, as an SVG picture.", metavar="FILE.svg"),
    ] = None,
    prompt_tokens: Annotated[int, measured_option(min=1, help="Length of each prompt.")] = 64,
    tokens: Annotated[
        int | None,
        measured_option(
            min=2, help=f"Tokens to generate for each prompt. Default {DEFAULT_TOKENS}, with --quick {QUICK_TOKENS}."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        measured_option(
            min=1, help=f"Rounds; each runs everything once. Default {DEFAULT_ROUNDS}, with --quick {QUICK_ROUNDS}."
        ),
    ] = None,
    quick: Annotated[bool, measured_option("--quick", help="Fewer tokens and rounds: sooner, but noisier.")] = False,
    speculative_config: SpeculativeConfigs = None,
    as_json: AsJson = False,
    model: ModelOptions,
) -> None:
    engine = EngineConfig(**(model.settings() | {"model": chosen_model(positional, model)}))
    packaged = packaged_speculations(engine.model)
    given = speculative_config or [*packaged, SPECULATIVE_EXAMPLE]
    speculations = [SpeculativeConfig.of(speculative_mapping(text)) for text in given]
    # The number of drafts adapts to text and load by default; fixed numbers show what that gains.
    if fixed_drafts is None:
        fixed_drafts = "" if speculative_config else FIXED_DRAFTS

    from outrider.tools.bench.busy import THREADS_ADVICE, how_busy
    from outrider.tools.bench.decode import DecodeBenchConfig, measure, measurements, prepare

    busy = how_busy(THREADS_ADVICE)
    config = DecodeBenchConfig(
        engine=engine,
        speculations=tuple(dict.fromkeys(each for each in speculations if each is not None)),
        batches=whole_numbers(",".join(batch or [DEFAULT_BATCHES]), "--batch"),
        fixed_drafts=whole_numbers(fixed_drafts, "--k"),
        texts=None if text is None else tuple(dict.fromkeys(kind.strip() for kind in text.split(","))),
        reference=not no_reference,
        prompt_tokens=prompt_tokens,
        tokens=tokens or (QUICK_TOKENS if quick else DEFAULT_TOKENS),
        rounds=rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
    )
    with loading() as progress:
        arena = prepare(config, progress=progress)
    note(arena.note and f"{arena.note}; only Outrider is measured")
    note(busy)
    with progress_bar() as bar:
        task = bar.add_task("", total=measurements(config, arena))
        begun, shown = 0, ["nothing yet"]

        def report_progress(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            if not errors.is_terminal and not what.startswith(shown[-1]):
                # A log or a pipe gets one line per round.
                shown.append(what.split(":")[0])
                errors.print(f"{shown[-1]} …")
            begun += 1

        report = measure(config, arena, report_progress) | {"busy": busy}
    if plot is not None:
        _write_plot(plot, report)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_report(report)


def _write_plot(path: Path, report: dict[str, Any]) -> None:
    from outrider.tools.bench.decode_plot import decode_plot

    try:
        path.write_text(decode_plot(report), encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem.strerror or problem}") from None


def print_report(report: dict[str, Any]) -> None:
    config = report["config"]
    rounds, threads = config["rounds"], config["num_threads"]
    out.print(
        f"{report['model']}, {report['dtype']}, {report['backend']}, {threads} thread{'s' * (threads > 1)}: "
        f"{config['tokens']} tokens after {config['prompt_tokens']}, "
        + (f"medians of {rounds} rounds" if rounds > 1 else "one round")
    )
    compared = any(entry["ratio"] is not None for case in report["cases"] for entry in case["contestants"].values())
    for case in report["cases"]:
        out.print(_case_table(case, compared=compared))
    for name in dict.fromkeys(choice["contestant"] for case in report["cases"] for choice in case["auto"]):
        _print_choices(name, report["cases"])
    _print_agreement(report, compared=compared)
    # The number of drafts does not change the size of the draft KV.
    by_method = {name.split(", ")[1]: part for name, part in report["draft_kv_share"].items() if part}
    if by_method:
        sizes = ", ".join(f"{part:.1%} with {method}" for method, part in by_method.items())
        out.print(f"Draft KV, relative to the target's: {sizes}.", soft_wrap=True)
    memory = dict(report["memory_mb"])
    peak = memory.pop("peak")
    resident = ", ".join(f"{megabytes:,.0f} MB with {name}" for name, megabytes in memory.items())
    out.print(f"Memory: {resident}; peak {peak:,.0f} MB.", soft_wrap=True)


def _case_table(case: dict[str, Any], *, compared: bool) -> Table:
    headings = ["prompt,\nms", "tokens/s", "step, ms", "tokens\nper step", "relative\nto plain"]
    headings += ["relative to\nTransformers"] if compared else []
    table = plain_table(f"\nbatch {case['batch']}, {case['text']} text", "", *headings)
    for name, entry in case["contestants"].items():
        row = [
            f"{entry['prompt_ms']:,.0f}",
            f"{entry['tokens_per_s']:.1f}",
            f"{entry['step_ms']:.1f}",
            f"{entry['tokens_per_step']:.2f}",
            f"{entry['ratio_to_plain']:.2f}×",
        ]
        if compared:
            row.append(f"{entry['ratio']:.2f}×")
        table.add_row(name, *row)
    return table


def _print_choices(name: str, cases: list[dict[str, Any]]) -> None:
    """Prints what the engine's choice of the number of drafts is worth, by batch size and kind of text."""
    texts = list(dict.fromkeys(case["text"] for case in cases))
    for measure, title in (("to_plain", "plain decoding"), ("to_best_fixed", "the best fixed k")):
        cells: dict[int, dict[str, str]] = {}
        for case in cases:
            for choice in case["auto"]:
                if choice["contestant"] == name and choice[measure] is not None:
                    cells.setdefault(case["batch"], {})[case["text"]] = ratio_text(choice[measure])
        if cells:
            out.print(f"\n[bold]{name}: relative to {title} (middle half of the rounds)[/bold]", soft_wrap=True)
            table = plain_table("", "batch", *texts)
            for batch, by_text in cells.items():
                table.add_row(str(batch), *(by_text[text] for text in texts))
            out.print(table)


def _print_agreement(report: dict[str, Any], *, compared: bool) -> None:
    entries = [entry for case in report["cases"] for entry in case["contestants"].values()]
    texts, differ, ties = (
        sum(entry[name] for entry in entries) for name in ("texts", "texts_that_differ", "at_a_proven_tie")
    )
    reference = "Transformers" if compared else "decoding without speculation"
    line = f"\nThe tokens are the same as with {reference} in {texts - differ} of {texts} texts"
    if differ:
        line += f"; of the other {differ}, {ties} differ at a proven tie"
    out.print(Text(f"{line}.", style="red" if differ > ties else "green"))
