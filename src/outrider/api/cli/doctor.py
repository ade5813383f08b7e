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

from outrider.api.cli.default_speculation import NoSpeculation, with_default_speculation
from outrider.api.cli.drafter_options import METHODS, speculation_of
from outrider.api.cli.engine_options import EngineOptions, ModelOptions, chosen_model, installed_drafters
from outrider.api.cli.grouped import grouped
from outrider.api.cli.terminal import errors, loading, out
from outrider.api.cli.wording import counted
from outrider.api.doctor.findings import Finding, Status
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from outrider.api.doctor.drafter import DrafterReport, Figures
    from outrider.api.doctor.lossless import Comparison
    from outrider.engine.engine import Engine

LOSSLESS_PROMPTS, LOSSLESS_TOKENS = 8, 32
QUICK_PROMPTS, QUICK_TOKENS = 2, 12
SELF_DRAFT_LAYERS = 10
STYLES = {Status.OK: ("ok", "green"), Status.NOTE: ("note", "yellow"), Status.PROBLEM: ("problem", "bold red")}

CHECK = "Lossless check"
DRAFTER = "Drafter"
MEMORY = "Memory"
DOCTOR_HELP = (
    "Look at the environment, the model, the drafter and the kernels.\n\n"
    "The engine is the one that [bold]outrider serve[/bold] would run with the same options: with the drafter that is "
    "made for the model, or else with n-gram look-up, unless another is named. [bold]--no-speculation[/bold] looks at "
    "the engine without any.\n\n"
    "At the end a few prompts run with and without speculation, greedy and seeded, and are compared token for "
    "token. A difference is accepted only if it is a proven tie: the logits are computed once more, and both "
    "tokens must be within 0.001 of the best. [bold]--lossless[/bold] does it at length and prints the "
    "certificate.\n\n"
    "[bold]--drafter[/bold] also finds out whether a drafter suits the model: acceptance on built-in chats, computed "
    "and from a warm prefix cache, and with other target layers. It says whether the drafter [bold]fits[/bold], is a "
    "[bold]weak drafter[/bold], reads the [bold]wrong layer ids[/bold] (and which would be right), was made for the "
    "[bold]wrong target[/bold], or meets [bold]stale KV[/bold]. Of the environment and the model it then shows only "
    "what is not in order.\n\n"
    "[bold]--memory[/bold] shows which layers share pages, which groups share an arena, and how many requests fit.\n\n"
    "Exit status: 0 if all is well or a drafter is merely weak, 1 if anything is wrong, 2 if the command was called "
    "wrongly.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider doctor\n\n"
    "  outrider doctor --lossless --prompts 32 --max-tokens 64\n\n"
    "  outrider doctor --drafter ./drafter\n\n"
    "  outrider doctor ./model --memory --drafter ./drafter --kv-retention tail\n\n"
    "  outrider doctor --lossless --sanitizer raise --sanitizer-level bytes --json"
)


@dataclass(kw_only=True)
class Report:
    environment: list[Finding]
    model: list[Finding] = field(default_factory=list)
    drafters: list[Finding] = field(default_factory=list)
    drafter: DrafterReport | None = None
    """Of the drafter that was asked about."""
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        fine = all(finding.status is not Status.PROBLEM for finding in (*self.environment, *self.model))
        fine = fine and (self.drafter is None or self.drafter.healthy)
        return fine and not any(comparison.failures for comparison in self.comparisons)

    def as_json(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "environment": [finding.as_json() for finding in self.environment],
            "model": [finding.as_json() for finding in self.model],
            "drafters": [finding.as_json() for finding in self.drafters],
            "drafter": None if self.drafter is None else self.drafter.as_json(),
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
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Does this drafter suit the model? A directory, a hub id or a built-in name.",
            show_default=False,
            rich_help_panel=DRAFTER,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"Its method: {', '.join(METHODS)}. Default: what its config.json says. Alone, it asks about the "
            "drafter that comes with the model.",
            show_default=False,
            rich_help_panel=DRAFTER,
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Only show who gets what of the memory for KV, with the drafter that is given or the usual one.",
            rich_help_panel=MEMORY,
        ),
    ] = False,
    no_speculation: NoSpeculation = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")] = False,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    name = chosen_model(positional, model)
    named = engine.speculative_config is not None
    if drafter is None and method is None:
        engine = with_default_speculation(engine, name, no_speculation=no_speculation)
    settings = model.settings() | engine.settings() | {"model": name}
    speculative = settings.pop("speculative_config")
    config = EngineConfig(**settings)
    given = asked = None
    if drafter is None and method is None:
        given = SpeculativeConfig.of(speculative)
    elif no_speculation:
        raise ConfigError("--no-speculation contradicts --drafter and --method; give one of them")
    else:
        asked = DrafterQuestion(speculative, method=method, drafter=drafter)
    usual = given is not None and not named
    if memory:
        if lossless:
            raise ConfigError("--memory and --lossless do different things; give one of them")
        from outrider.api.cli.doctor_memory import show_memory

        config = replace(config, speculative_config=asked.speculation() if asked else given)
        show_memory(config, usual=usual, as_json=as_json)
        return
    if lossless and no_speculation:
        raise ConfigError("--lossless compares drafters with none; leave --no-speculation out")

    from outrider.api.doctor.environment import look_at_environment

    report = Report(environment=look_at_environment())
    if not as_json:
        _print_findings("environment", report.environment, only_trouble=asked is not None)
    if report.healthy:
        number = prompts or (LOSSLESS_PROMPTS if lossless else QUICK_PROMPTS)
        tokens = max_tokens or (LOSSLESS_TOKENS if lossless else QUICK_TOKENS)
        check = LosslessCheck(given=given, usual=usual, every=lossless, prompts=number, max_tokens=tokens)
        _examine(report, config, asked, check, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    elif report.comparisons:
        _print_certificate(report.comparisons)
    elif no_speculation and report.healthy:
        out.print("Without speculation there is nothing to compare.")
    if not report.healthy:
        raise typer.Exit(1)


class DrafterQuestion:
    """The drafter that somebody asks about."""

    def __init__(self, speculative: dict[str, Any] | None, *, method: str | None, drafter: str | None) -> None:
        self._speculative, self._method, self.drafter = speculative, method, drafter
        known = method or (speculative or {}).get("method")
        if known is not None:
            self.speculation()  # a mistake in the options is one before anything is loaded

    def speculation(self) -> SpeculativeConfig:
        method = self._method
        if method is None and "method" not in (self._speculative or {}):
            from outrider.speculative.registry import guess_method

            assert self.drafter is not None
            method = guess_method(self.drafter)
        return speculation_of(self._speculative, method=method, drafter=self.drafter, k=None)


@dataclass(frozen=True, kw_only=True)
class LosslessCheck:
    given: SpeculativeConfig | None
    """None: there is nothing to compare."""
    usual: bool
    """Nobody named it: it is what `serve` takes."""
    every: bool
    prompts: int
    max_tokens: int


def _examine(
    report: Report, config: EngineConfig, asked: DrafterQuestion | None, check: LosslessCheck, *, as_json: bool
) -> None:
    """The model, its drafters, and the comparison."""
    from outrider.api.doctor.lossless import CheckPlan, check_prompts, compare_all
    from outrider.api.doctor.model import look_at_drafter, look_at_model
    from outrider.engine.build import build_engine

    try:
        with loading() as progress:
            served = build_engine(replace(config, speculative_config=check.given), progress=progress)
        report.model += look_at_model(served, config.model)
    except ModelError as problem:
        if check.given is not None and _can_be_built(config):
            raise  # the model is well: it is the drafter's
        report.model.append(Finding("model", str(problem), Status.PROBLEM, "choose another with --model"))
    if not as_json:
        _print_findings("model", report.model, only_trouble=asked is not None)
    if not report.healthy or (asked is None and check.given is None):
        return
    plain = served if check.given is None else build_engine(config, model=served.model)
    if asked is not None:
        report.drafter = _diagnose(plain, asked)
        if not as_json:
            _print_diagnosis(report.drafter)
        if report.drafter.figures is None:
            return
        check = replace(check, given=asked.speculation(), usual=False)
    # Where several follow, only one of them is to take memory at a time.
    ready = None if check.usual and check.every else served
    del served

    def build(speculation: SpeculativeConfig) -> Engine:
        changed = replace(config, speculative_config=speculation)
        if ready is not None and ready.config == changed:
            engine = ready
        else:
            engine = build_engine(changed, model=plain.model)
        report.drafters.append(look_at_drafter(engine, usual=check.usual and speculation == check.given))
        return engine

    drafters = [
        (_label(speculation), partial(build, speculation))
        for speculation in _drafters(config.model, len(plain.model.spec.layers), check)
    ]
    plan = CheckPlan(prompts=check_prompts(check.prompts), max_tokens=check.max_tokens)
    with errors.status("comparing", spinner="dots") as status:
        told: Callable[[str], None] = lambda what: status.update(f"comparing: {what}")  # noqa: E731
        report.comparisons += compare_all(plain, drafters, plan, told if errors.is_terminal else lambda what: None)
    if not as_json:
        _print_findings("drafters", report.drafters)


def _diagnose(plain: Engine, asked: DrafterQuestion) -> DrafterReport:
    from outrider.api.doctor.drafter import examine_drafter, refused

    try:
        speculation = asked.speculation()
    except ModelError as problem:
        return refused("unknown", asked.drafter or "", problem)
    with errors.status("measuring acceptance", spinner="dots") as status:
        told: Callable[[str], None] = lambda what: status.update(f"measuring acceptance: {what}")  # noqa: E731
        return examine_drafter(plain, speculation, told if errors.is_terminal else lambda what: None)


def _can_be_built(config: EngineConfig) -> bool:
    from outrider.engine.build import build_engine

    try:
        build_engine(config)
    except ModelError:
        return False
    return True


def _drafters(model: str, layers: int, check: LosslessCheck) -> Iterator[SpeculativeConfig]:
    """What is asked for; else what `serve` takes or, for the long check, look-up, what is made for the model, and the
    model's own first layers."""
    assert check.given is not None
    if not (check.usual and check.every):
        yield check.given
        return
    yield SpeculativeConfig(method="ngram")
    for method in installed_drafters(model):
        yield SpeculativeConfig(method=method)
    few = min(SELF_DRAFT_LAYERS, max(1, layers - 1))
    yield SpeculativeConfig(method="draft_model", model=model, num_hidden_layers=few)


def _label(speculation: SpeculativeConfig) -> str:
    layers = speculation.num_hidden_layers
    return speculation.method + (f", {layers}L" if layers is not None else "")


def _print_findings(title: str, findings: Sequence[Finding], *, only_trouble: bool = False) -> None:
    """`only_trouble`: whoever asks about one drafter after another need not read all of the rest each time."""
    if only_trouble:
        findings = [finding for finding in findings if finding.status is not Status.OK]
    if not findings:
        return
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


def _print_diagnosis(report: DrafterReport) -> None:
    if report.figures is not None:
        k = report.figures.k
        title = f"acceptance of {report.drafter} ({report.method}, {counted(k, 'draft')} a step)"
        out.print(Text(title, style="bold"), soft_wrap=True)
        out.print(_figures_table(report.figures))
        out.print()
    _print_findings("diagnosis", [report.finding])


def _figures_table(figures: Figures) -> Table:
    table = Table(
        caption=f"{figures.chats} built-in chats, {figures.tokens:,} tokens, greedy",
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("")
    table.add_column("length", justify="right")
    table.add_column("against\ncold", justify="right")
    table.add_column("reads the output of layers")
    rows = [("from a warm prefix cache", figures.warm)]
    rows += [(f"layer ids {shift:+d}", figure) for shift, figure in figures.shifted.items()]
    rows.append(("layers backwards: chance", figures.chance))
    table.add_row("as it is, cold", f"{figures.cold:.2f}", "", _listed(figures.taps))
    for name, figure in rows:
        if figure is not None:
            table.add_row(name, f"{figure.length:.2f}", f"{figure.ratio - 1:+.1%}", _listed(figure.taps))
    return table


def _listed(taps: Sequence[int]) -> str:
    return ", ".join(map(str, taps)) or "none"


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
        out.print(Text(f"NOT lossless: {counted(failures, 'difference')} beyond ties", style="bold red"))
    else:
        out.print(Text(f"lossless: {tokens:,} tokens compared, every one the same up to proven ties", style="green"))
