"""`outrider bench transfer`: how fast KV moves between workers, and how soon a prefill and a decode worker answer."""

from __future__ import annotations

import json
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
from outrider.cli.terminal import errors, loading, note, out, plain_table
from outrider.config import KV_TRANSPORTS
from outrider.errors import ConfigError
from outrider.tools.doctor.findings import bytes_text

DEFAULT_PAGES = (16, 32)
DEFAULT_PROMPTS, QUICK_PROMPTS = (512, 1024, 2048, 4096, 8000), (512, 2048)
DEFAULT_MOVED, QUICK_MOVED = 1024, 256
DEFAULT_ROUNDS, QUICK_ROUNDS = 5, 2
LINKS, FIRST_TOKENS = PARTS = ("links", "first-tokens")
measured_option = panel("What is measured")

TRANSFER_HELP = (
    "Measure what it costs to move KV between workers.\n\n"
    "First the speed of each link, for the KV of one prompt, with pages of equal and of different lengths on the two "
    "sides: within a process, and between two processes over NIXL by cma and by tcp; beside a plain copy of as many "
    "bytes, and beside bare calls to NIXL that read the same bytes. Then the time to the first tokens of a prefill and "
    "a decode worker, two processes, against one worker with the same settings: how much of it is spent moving data, "
    "in which phases, and what a hand-off costs beyond the bytes. All that is compared runs in turns; ratios are "
    "medians over the rounds.\n\n"
    "Without NIXL (pip install 'outrider\\[pd]') only the link within a process is measured.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench transfer\n\n"
    "  outrider bench transfer --quick --only links\n\n"
    "  outrider bench transfer --prompt-tokens 4096 --transport tcp --json"
)


@grouped
def bench_transfer(
    *,
    positional: PositionalModel = None,
    only: Annotated[str | None, measured_option(help=f"Measure one part: {' or '.join(PARTS)}.")] = None,
    page_tokens: Annotated[
        list[int] | None,
        measured_option(min=1, help="Block size to measure links with; may be repeated. Default 16 and 32."),
    ] = None,
    moved_tokens: Annotated[
        int | None,
        measured_option(
            min=1, help=f"Prompt whose KV the links move. Default {DEFAULT_MOVED}, with --quick {QUICK_MOVED}."
        ),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        measured_option(
            min=1,
            help="Length of a prompt to hand over; may be repeated. Default "
            f"{', '.join(map(str, DEFAULT_PROMPTS))}, with --quick {', '.join(map(str, QUICK_PROMPTS))}.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        measured_option(
            min=1, help=f"Rounds; each measures everything once. Default {DEFAULT_ROUNDS}, with --quick {QUICK_ROUNDS}."
        ),
    ] = None,
    transport: Annotated[
        str, measured_option(help=f"How hand-offs move KV: {', '.join(KV_TRANSPORTS)}.")
    ] = KV_TRANSPORTS[0],
    quick: Annotated[
        bool, measured_option("--quick", help="Shorter prompts, fewer rounds: sooner, but noisier.")
    ] = False,
    no_speculation: NoSpeculation = False,
    as_json: AsJson = False,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    if only is not None and only not in PARTS:
        raise ConfigError(f"--only {only}: there is no such part; choose {' or '.join(PARTS)}")
    name = chosen_model(positional, model)
    engine = with_default_speculation(engine, name, no_speculation=no_speculation)
    settings = engine_config(name, model, engine)

    from outrider.tools.bench.busy import how_busy
    from outrider.tools.bench.transfer import TransferBenchConfig, measure, why_no_nixl

    config = TransferBenchConfig(
        engine=settings,
        links=only != FIRST_TOKENS,
        first_tokens=only != LINKS,
        page_tokens=tuple(dict.fromkeys(page_tokens or DEFAULT_PAGES)),
        moved_tokens=moved_tokens or (QUICK_MOVED if quick else DEFAULT_MOVED),
        prompt_tokens=tuple(prompt_tokens or (QUICK_PROMPTS if quick else DEFAULT_PROMPTS)),
        rounds=rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
        transport=transport,
    )
    busy = how_busy()
    note(busy)
    missing = why_no_nixl()
    note(missing and f"only the link within a process is measured: {missing}")
    with loading() as progress, errors.status("loading", spinner="dots") as status:

        def report_progress(what: str) -> None:
            if errors.is_terminal:
                status.update(what)
            else:
                errors.print(f"{what} …", style="dim")

        report = measure(config, loading=progress, progress=report_progress) | {"busy": busy}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_report(report)


def print_report(report: dict[str, Any]) -> None:
    rounds = report["config"]["rounds"]
    drafter = f" with {report['drafter']}" if report["drafter"] else ""
    out.print(
        f"{report['model']}{drafter}, {report['backend']}; "
        + (f"medians of {rounds} rounds" if rounds > 1 else "one round")
    )
    for case in report["links"] or ():
        _print_links(case)
    if report["first_tokens"] is not None:
        _print_first_tokens(report["first_tokens"])


def _print_links(case: dict[str, Any]) -> None:
    out.print(
        Text(
            f"\nPages of {case['source_page_tokens']} tokens into pages of {case['destination_page_tokens']}: "
            f"{case['tokens']:,} tokens, {bytes_text(case['bytes'])} in {case['spans']:,} pieces",
            style="bold",
        ),
        soft_wrap=True,
    )
    table = plain_table("", "", "GB/s", "best", "relative\nto copy", "relative to\nbare calls")
    for name, entry in case["ways"].items():
        bare = entry["ratio_to_bare"]
        table.add_row(
            name,
            f"{entry['gb_per_s']:.2f}",
            f"{entry['best_gb_per_s']:.2f}",
            f"{entry['ratio_to_copy']:.2f}×",
            "" if bare is None else f"{bare:.2f}×",
        )
    out.print(table)
    for remark in case["notes"]:
        out.print(Text(f"not measured: {remark}", style="yellow"), soft_wrap=True)


FIRST_TOKENS_ROWS = (
    ("first token, one worker", "alone_first_token_ms"),
    ("first token, P + D", "first_token_ms"),
    ("second token, one worker", "alone_second_token_ms"),
    ("second token, P + D", "second_token_ms"),
)
PHASE_NAMES = {
    "prefill": "P computes the prompt",
    "ticket": "ticket to D",
    "fetch": "D asks for the KV",
    "queued": "D finds pages",
    "read": "D reads",
    "confirmed": "P confirms",
    "woken": "D plans its step",
    "step": "D's first step",
}


def _print_first_tokens(report: dict[str, Any]) -> None:
    prompts = report["prompts"]
    lengths = [f"{row['prompt_tokens']:,}" for row in prompts]
    title = f"\nPrefill and decode worker over {report['transport']}: milliseconds, by length of the prompt"
    out.print(Text(title, style="bold"), soft_wrap=True)
    table = plain_table("", "", *lengths)
    for label, name in FIRST_TOKENS_ROWS:
        table.add_row(label, *(f"{row[name]:,.1f}" for row in prompts))
        if name in ("first_token_ms", "second_token_ms"):
            ratio = name.replace("_ms", "_ratio")
            table.add_row("  relative to one worker", *(f"{row[ratio]:.3f}×" for row in prompts))
    table.add_row("  part spent moving data", *(f"{row['moved_share']:.1%}" for row in prompts))
    table.add_section()
    for phase, label in PHASE_NAMES.items():
        table.add_row(label, *(f"{row['phases_ms'][phase]:,.1f}" for row in prompts))
    table.add_section()
    table.add_row("bare calls read as much in", *(f"{row['bare_read_ms']:,.1f}" for row in prompts))
    table.add_row("hand-off beyond the bytes", *(f"{row['overhead_ms']:,.1f}" for row in prompts))
    out.print(table)
    out.print(
        Text(
            f"\nA hand-off costs {report['overhead_ms']:.1f} ms beyond moving the bytes "
            f"(at most {report['overhead_limit_ms']:.0f} are meant to be), and the first contact of two workers "
            f"{report['first_contact_ms']:.0f} ms once.",
            style="" if report["overhead_within_limit"] else "yellow",
        ),
        soft_wrap=True,
    )
    texts, differ = (sum(row[name] for row in report["prompts"]) for name in ("texts", "texts_that_differ"))
    out.print(
        Text(
            f"The tokens are those of one worker in {texts - differ} of {texts} texts.",
            style="red" if differ else "green",
        )
    )
