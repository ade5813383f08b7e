"""`outrider doctor`: is everything in order here, and does speculation leave the text as it is?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.api.cli.engine_options import EngineOptions, ModelOptions, chosen_model
from outrider.api.cli.grouped import grouped
from outrider.api.cli.terminal import errors, loading, out
from outrider.api.doctor.findings import Finding, Status
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ModelError

if TYPE_CHECKING:
    from outrider.api.doctor.lossless import Comparison
    from outrider.engine.engine import Engine

LOSSLESS_PROMPTS, LOSSLESS_TOKENS = 8, 32
QUICK_PROMPTS, QUICK_TOKENS = 2, 12
SELF_DRAFT_LAYERS = 10
STYLES = {Status.OK: ("ok", "green"), Status.NOTE: ("note", "yellow"), Status.PROBLEM: ("problem", "bold red")}

CHECK = "Lossless check"
DOCTOR_HELP = (
    "Look at the environment, the model, the drafter and the kernels.\n\n"
    "At the end a few prompts run with and without speculation, greedy and seeded, and are compared token for "
    "token. A difference is accepted only if it is a proven tie: the logits are computed once more, and both "
    "tokens must be within 0.001 of the best. [bold]--lossless[/bold] does it at length and prints the "
    "certificate.\n\n"
    "Exit status: 0 if all is well, 1 if anything is wrong, 2 if the command was called wrongly.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider doctor\n\n"
    "  outrider doctor --lossless --prompts 32 --max-tokens 64\n\n"
    "  outrider doctor --lossless --sanitizer raise --sanitizer-level bytes --json"
)


@dataclass(kw_only=True)
class Report:
    environment: list[Finding]
    model: list[Finding] = field(default_factory=list)
    drafters: list[Finding] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        fine = all(finding.status is not Status.PROBLEM for finding in (*self.environment, *self.model))
        return fine and not any(comparison.failures for comparison in self.comparisons)

    def as_json(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "environment": [finding.as_json() for finding in self.environment],
            "model": [finding.as_json() for finding in self.model],
            "drafters": [finding.as_json() for finding in self.drafters],
            "lossless": [comparison.as_json() for comparison in self.comparisons],
        }


@grouped
def doctor(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    lossless: Annotated[
        bool,
        typer.Option(
            "--lossless", help="Compare at length, with every drafter that works here.", rich_help_panel=CHECK
        ),
    ] = False,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"How many prompts. Default {QUICK_PROMPTS}, with --lossless {LOSSLESS_PROMPTS}.",
            show_default=False,
            rich_help_panel=CHECK,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens for each. Default {QUICK_TOKENS}, with --lossless {LOSSLESS_TOKENS}.",
            show_default=False,
            rich_help_panel=CHECK,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")] = False,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    settings = model.settings() | engine.settings() | {"model": chosen_model(positional, model)}
    given = SpeculativeConfig.of(settings.pop("speculative_config"))
    config = EngineConfig(**settings)

    from outrider.api.doctor.environment import look_at_environment

    report = Report(environment=look_at_environment())
    if not as_json:
        _print_findings("environment", report.environment)
    if report.healthy:
        number = prompts or (LOSSLESS_PROMPTS if lossless else QUICK_PROMPTS)
        tokens = max_tokens or (LOSSLESS_TOKENS if lossless else QUICK_TOKENS)
        _examine(report, config, given, every=lossless, prompts=number, max_tokens=tokens, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    elif report.comparisons:
        _print_certificate(report.comparisons)
    if not report.healthy:
        raise typer.Exit(1)


def _examine(
    report: Report,
    config: EngineConfig,
    given: SpeculativeConfig | None,
    *,
    every: bool,
    prompts: int,
    max_tokens: int,
    as_json: bool,
) -> None:
    """The model, its drafters, and the comparison."""
    from outrider.api.doctor.lossless import CheckPlan, check_prompts, compare_all
    from outrider.api.doctor.model import look_at_drafter, look_at_model
    from outrider.engine.build import build_engine

    try:
        with loading() as progress:
            plain = build_engine(config, progress=progress)
        report.model += look_at_model(plain, config.model)
    except ModelError as problem:
        report.model.append(Finding("model", str(problem), Status.PROBLEM, "choose another with --model"))
    if not as_json:
        _print_findings("model", report.model)
    if not report.healthy:
        return

    def build(speculation: SpeculativeConfig) -> Engine:
        engine = build_engine(replace(config, speculative_config=speculation), model=plain.model)
        report.drafters.append(look_at_drafter(engine))
        return engine

    drafters = [
        (_label(speculation), partial(build, speculation))
        for speculation in _drafters(config.model, len(plain.model.spec.layers), given, every=every)
    ]
    plan = CheckPlan(prompts=check_prompts(prompts), max_tokens=max_tokens)
    with errors.status("comparing", spinner="dots") as status:
        told: Callable[[str], None] = lambda what: status.update(f"comparing: {what}")  # noqa: E731
        report.comparisons += compare_all(plain, drafters, plan, told if errors.is_terminal else lambda what: None)
    if not as_json:
        _print_findings("drafters", report.drafters)


def _drafters(model: str, layers: int, given: SpeculativeConfig | None, *, every: bool) -> Iterator[SpeculativeConfig]:
    """What is asked for; else look-up and, for the long check, the first layers of the model itself."""
    if given is not None:
        yield given
        return
    yield SpeculativeConfig(method="ngram")
    if every:
        few = min(SELF_DRAFT_LAYERS, max(1, layers - 1))
        yield SpeculativeConfig(method="draft_model", model=model, num_hidden_layers=few)


def _label(speculation: SpeculativeConfig) -> str:
    layers = speculation.num_hidden_layers
    return speculation.method + (f", {layers}L" if layers is not None else "")


def _print_findings(title: str, findings: Sequence[Finding]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        word, style = STYLES[finding.status]
        text = Text(finding.text)
        if finding.advice is not None:
            text.append(f"\n→ {finding.advice}", style=style)
        table.add_row(Text(word, style=style), finding.name, text)
    out.print(table)
    out.print()


def _print_certificate(comparisons: Sequence[Comparison]) -> None:
    table = Table(
        title="with speculation against without, token for token",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("drafter", no_wrap=True)
    table.add_column("sampling")
    for heading in ("prompts", "tokens", "exact", "proven\nties", "failures", "acceptance\nlength"):
        table.add_column(heading, justify="right")
    for each in comparisons:
        numbers = (each.prompts, each.tokens, each.exact, len(each.ties), len(each.failures))
        table.add_row(
            each.drafter,
            each.sampling,
            *map(str, numbers),
            f"{each.acceptance_length:.2f}" if each.drafts else "no drafts",
            style="red" if each.failures else None,
        )
    out.print(table)
    for each in comparisons:
        for difference in each.failures:
            out.print(Text(f"{each.drafter}, {each.sampling}: {difference}", style="red"), soft_wrap=True)
        for difference in each.ties:
            out.print(Text(f"tie: {each.drafter}, {each.sampling}: {difference}", style="dim"), soft_wrap=True)
    failures = sum(len(each.failures) for each in comparisons)
    tokens = sum(each.tokens for each in comparisons)
    if failures:
        out.print(Text(f"NOT lossless: {failures} difference(s) that are no ties", style="bold red"))
    else:
        out.print(Text(f"lossless: {tokens:,} tokens compared, every one the same up to proven ties", style="green"))
