"""`outrider bench serve --url` and `--concurrency`: what a server achieves under each of several loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text

from outrider.cli.grouped import panel
from outrider.cli.terminal import errors, note, out, plain_table, progress_bar, ratio_text

if TYPE_CHECKING:
    from outrider.tools.bench.serve_rates import RatesConfig

server_option = panel("A server under several loads")
DEFAULT_CONCURRENCY = "1,2,4,8,16"
DEFAULT_TOKENS, QUICK_TOKENS = 128, 48
DEFAULT_ROUNDS, QUICK_ROUNDS = 3, 1
KINDS = ("chat", "ordinary", "repetitive", "copying")


@dataclass(frozen=True, kw_only=True)
class ServerLoadOptions:
    url: Annotated[
        str | None,
        server_option(
            help="Server to measure: any that speaks OpenAI's API. Without it, one is started for the run.",
            metavar="URL",
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        server_option(
            help="Numbers of clients, each with one request at a time. "
            f"Default {DEFAULT_CONCURRENCY}, unless --rate or --burst is given.",
            metavar="N,N,…",
        ),
    ] = None
    rate: Annotated[
        str | None,
        server_option(help="Requests a second that arrive at random (Poisson), such as 0.5,2.", metavar="R,R,…"),
    ] = None
    burst: Annotated[
        str | None,
        server_option(help="Requests that arrive at once, and seconds between, such as 8/2.0.", metavar="N/S,…"),
    ] = None
    compare_speculation: Annotated[
        bool,
        server_option(
            "--compare-speculation",
            help="Send everything with and without speculation, in turns, and print ratios; Outrider's servers only.",
        ),
    ] = False
    quick: Annotated[bool, server_option("--quick", help="Fewer and shorter answers: sooner, but noisier.")] = False
    requests: Annotated[
        int | None,
        server_option(min=1, help="Requests in each round of each load. Default: as many as suit the load."),
    ] = None
    text: Annotated[str, server_option(help=f"Kinds of prompts, of {', '.join(KINDS)}.", metavar="KIND,KIND,…")] = (
        "chat"
    )
    prompts: Annotated[
        Path | None,
        server_option(help='Questions of your own, one {"prompt": "…"} per line, instead.', metavar="FILE"),
    ] = None
    api_key: Annotated[str | None, server_option(help="Key that the server wants.", metavar="KEY")] = None

    @property
    def is_wanted(self) -> bool:
        """Whether any of these options is given, which chooses this measurement."""
        return self != ServerLoadOptions()


def rates_config(
    options: ServerLoadOptions, *, prompt_tokens: int, tokens: int | None, rounds: int | None, seed: int
) -> RatesConfig:
    from outrider.tools.bench.arrivals import burst_loads, closed_loads, poisson_loads
    from outrider.tools.bench.serve_rates import RatesConfig

    concurrency = options.concurrency
    if concurrency is None and options.rate is None and options.burst is None:
        concurrency = DEFAULT_CONCURRENCY
    loads = [
        *closed_loads(concurrency or ""),
        *poisson_loads(options.rate or ""),
        *burst_loads(options.burst or ""),
    ]
    return RatesConfig(
        loads=tuple(dict.fromkeys(loads)),
        texts=tuple(dict.fromkeys(kind.strip() for kind in options.text.split(","))),
        questions=() if options.prompts is None else _questions(options.prompts),
        prompt_tokens=prompt_tokens,
        tokens=tokens or (QUICK_TOKENS if options.quick else DEFAULT_TOKENS),
        requests=options.requests,
        rounds=rounds or (QUICK_ROUNDS if options.quick else DEFAULT_ROUNDS),
        seed=seed,
        compare_speculation=options.compare_speculation,
        quick=options.quick,
    )


def _questions(path: Path) -> tuple[str, ...]:
    from outrider.tools.bench.acceptance import read_chats

    # Later turns of a chat need answers to the earlier ones.
    return tuple(chat.turns[0] for chat in read_chats(path))


def measure_server(config: RatesConfig, url: str, *, model: str | None, key: str | None) -> dict[str, Any]:
    from outrider.tools.bench.busy import how_busy
    from outrider.tools.bench.openai_server import look_at
    from outrider.tools.bench.serve_rates import measure, measurements, raise_if_nothing_worked

    busy = how_busy()
    note(busy)
    facts = look_at(url, model=model, key=key, route=config.route(config.kinds[0]))
    with progress_bar() as bar:
        task = bar.add_task("", total=measurements(config))
        begun = 0

        def report_progress(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            begun += 1
            if not errors.is_terminal:
                errors.print(f"{what} …", style="dim", soft_wrap=True)

        report = measure(config, facts, key=key, progress=report_progress)
    raise_if_nothing_worked(report)
    return report | {"busy": busy}


# ---- the tables ------------------------------------------------------------------------------------


def print_rates(report: dict[str, Any]) -> None:
    rounds = report["rounds"]
    out.print(
        f"{report['model']} at {report['url']}: answers of {report['tokens']} tokens, "
        + (f"{rounds} rounds" if rounds > 1 else "one round"),
        soft_wrap=True,
    )
    for kind in dict.fromkeys(case["text"] for case in report["cases"]):
        cases = [case for case in report["cases"] if case["text"] == kind]
        out.print(_rates_table(kind, cases))
        if cases[0]["comparison"] is not None:
            out.print(_ratios_table(cases))
    for case in report["cases"]:
        for name, entry in case["variants"].items():
            _print_failures(f"{case['load']}, {case['text']}, {name}", entry)
    _print_texts(report)
    for each in report["notes"]:
        out.print(Text(f"note: {each}", style="yellow"), soft_wrap=True)


def _rates_table(kind: str, cases: list[dict[str, Any]]) -> Table:
    from outrider.tools.bench.serve_rates import OFF, ON

    failed = any(entry["failures"] for case in cases for entry in case["variants"].values())
    headings = ["tokens/s", "TTFT, ms\nmean", "\np50", "\np99", "a token, ms\nmean", "\np50", "\np99", "sent"]
    headings += ["failed"] if failed else []
    compared = cases[0]["comparison"] is not None
    table = plain_table(f"\n{kind}{': speculation on and off' if compared else ''}", "", *headings)
    for case in cases:
        for name, entry in case["variants"].items():
            label = {ON: f"{case['load']}, on", OFF: f"{case['load']}, off"}.get(name, case["load"])
            rate = entry["tokens_per_s"]
            cells = ["–" if rate is None else f"{rate:,.1f}"]
            for latencies, decimals in ((entry["ttft_ms"], 0), (entry["tpot_ms"], 1)):
                cells += ["–"] * 3 if latencies is None else [f"{each:,.{decimals}f}" for each in latencies.values()]
            cells += [str(entry["requests"])] + ([str(sum(entry["failures"].values()))] if failed else [])
            table.add_row(label, *cells)
    return table


COMPARED = (("tokens_per_s", "tokens/s"), ("ttft_ms", "TTFT"), ("tpot_ms", "time per token"))


def _ratios_table(cases: list[dict[str, Any]]) -> Table:
    title = "\nspeculation relative to none (middle half of the pairs); above 1 is better"
    table = plain_table(title, "", *(label for _name, label in COMPARED), "pairs")
    for case in cases:
        measures = [case["comparison"].get(name) for name, _label in COMPARED]
        cells = ["–" if measure is None else ratio_text(measure) for measure in measures]
        table.add_row(case["load"], *cells, str(0 if measures[0] is None else len(measures[0]["pairs"])))
    return table


def _print_failures(where: str, entry: dict[str, Any]) -> None:
    if entry["failures"]:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in entry["failures"].items())
        line = f"failed ({where}): {kinds}; the first one: {entry['first_failure']}"
        out.print(Text(line, style="red"), soft_wrap=True)


def _print_texts(report: dict[str, Any]) -> None:
    compared = [case["comparison"] for case in report["cases"] if case["comparison"] is not None]
    texts = sum(each["texts"] for each in compared)
    if texts:
        differ = sum(each["texts_that_differ"] for each in compared)
        line = f"\nThe text is the same with and without speculation in {texts - differ} of {texts} answers."
        out.print(Text(line, style="yellow" if differ else "green"))
