"""`outrider doctor`: checks the machine, the model and its drafter, and that speculation does not change the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.drafter_options import METHODS, NoSpeculation, speculation_of, with_default_speculation
from outrider.cli.engine_options import (
    AsJson,
    EngineOptions,
    ModelOptions,
    PositionalModel,
    chosen_model,
    installed_drafters,
)
from outrider.cli.findings import print_findings
from outrider.cli.grouped import grouped, panel
from outrider.cli.serve_options import API_KEY_VARIABLE
from outrider.cli.terminal import loading, out, working
from outrider.cli.transfer_options import TransferOptions
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError, ModelError
from outrider.tools.doctor.findings import Finding, Status
from outrider.tools.wording import counted

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.tools.doctor.drafter import DrafterReport, Figures
    from outrider.tools.doctor.lossless import Comparison

LOSSLESS_PROMPTS, LOSSLESS_TOKENS = 8, 32
QUICK_PROMPTS, QUICK_TOKENS = 2, 12
SELF_DRAFT_LAYERS = 10

check_option = panel("Lossless check")
drafter_option = panel("Drafter")
memory_option = panel("Memory")
peer_option = panel("Prefill workers")
store_option = panel("Shared store")
DOCTOR_HELP = (
    "Check the environment, the model, the drafter and the kernels.\n\n"
    "The engine is the one that [bold]outrider serve[/bold] would run with the same options: with the drafter that is "
    "installed for the model, or else with n-gram look-up, unless another is named. [bold]--no-speculation[/bold] "
    "checks the engine without a drafter.\n\n"
    "At the end a few prompts run with and without speculation, greedy and seeded, and the outputs are compared token "
    "for token. A difference is accepted only if it is a proven tie: the logits are computed once more, and both "
    "tokens must be within 0.001 of the best. [bold]--lossless[/bold] compares more prompts, with every drafter.\n\n"
    "[bold]--drafter[/bold] also finds out whether a drafter suits the model. It measures acceptance on built-in "
    "chats, with a cold and with a warm prefix cache, and with other target layers. It says whether the drafter "
    "[bold]fits[/bold], is a "
    "[bold]weak drafter[/bold], reads the [bold]wrong layer ids[/bold] (and which would be right), was made for the "
    "[bold]wrong target[/bold], or reads [bold]stale KV[/bold]. Of the environment and the model it then shows only "
    "problems.\n\n"
    "[bold]--memory[/bold] shows which layers share pages, which groups share an arena, and how many requests fit.\n\n"
    "[bold]--peer[/bold] asks a prefill worker whether its KV is of use to this engine: it compares weights, dtype, "
    "layout and drafter in a real handshake, finds out how KV would travel, and reads some.\n\n"
    "[bold]--store[/bold] connects to a Mooncake Store, writes values, reads them back and removes them.\n\n"
    "Exit status: 0 if all is well or a drafter is merely weak, 1 if a check failed, 2 if the options are wrong."
    "\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider doctor\n\n"
    "  outrider doctor --lossless --prompts 32 --max-tokens 64\n\n"
    "  outrider doctor --drafter ./drafter\n\n"
    "  outrider doctor ./model --memory --drafter ./drafter --kv-retention tail\n\n"
    "  outrider doctor --peer http://10.0.0.7:8000 --cluster-key @key.txt\n\n"
    "  outrider doctor --store --kv-store-config JSON --cluster-key @key.txt\n\n"
    "  outrider doctor --lossless --sanitizer raise --sanitizer-level bytes --json"
)


@dataclass(kw_only=True)
class Report:
    environment: list[Finding]
    model: list[Finding] = field(default_factory=list)
    drafters: list[Finding] = field(default_factory=list)
    drafter: DrafterReport | None = None
    """Diagnosis of the drafter that --drafter or --method names."""
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
    positional: PositionalModel = None,
    lossless: Annotated[
        bool, check_option("--lossless", help="Compare more prompts, with every drafter that works here.")
    ] = False,
    prompts: Annotated[
        int | None,
        check_option(min=1, help=f"Number of prompts. Default {QUICK_PROMPTS}, with --lossless {LOSSLESS_PROMPTS}."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        check_option(
            min=1,
            help=f"Tokens to generate for each prompt. Default {QUICK_TOKENS}, with --lossless {LOSSLESS_TOKENS}.",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        drafter_option(
            metavar="PATH", help="Check whether this drafter suits the model: a directory, a hub id or a built-in name."
        ),
    ] = None,
    method: Annotated[
        str | None,
        drafter_option(
            help=f"Method of the drafter: {METHODS}. Default: what its config.json says. Without --drafter, the "
            "drafter that is installed for the model is checked."
        ),
    ] = None,
    memory: Annotated[
        bool,
        memory_option(
            "--memory",
            help="Only show how the memory for the KV cache is divided, with the given or the default drafter.",
        ),
    ] = False,
    peers: Annotated[
        list[str] | None,
        peer_option(
            "--peer",
            metavar="URL",
            help="Only ask this prefill worker whether its KV is of use to the engine: http://HOST:PORT of "
            "`outrider serve`, or HOST:PORT of its KV endpoint; may be repeated.",
        ),
    ] = None,
    api_keys: Annotated[
        list[str] | None,
        peer_option(
            "--api-key",
            metavar="KEY",
            help=f"API key of the servers that --peer names. @FILE reads it; {API_KEY_VARIABLE} may hold it.",
        ),
    ] = None,
    store: Annotated[
        bool,
        store_option(
            "--store", help="Only ask the Mooncake Store of --kv-store-config whether workers here can use it."
        ),
    ] = False,
    no_speculation: NoSpeculation = False,
    as_json: AsJson = False,
    model: ModelOptions,
    engine: EngineOptions,
    transfer: TransferOptions,
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
    is_default = given is not None and not named
    if sum((memory, lossless, peers is not None, store)) > 1:
        raise ConfigError("--memory, --lossless, --peer and --store exclude each other; give one of them")
    if store:
        from outrider.cli.doctor_store import show_store

        show_store(transfer, as_json=as_json)
        return
    if peers is not None:
        from outrider.cli.doctor_peer import show_peers

        config = replace(config, speculative_config=asked.speculation() if asked else given)
        show_peers(config, peers, transfer, api_keys, as_json=as_json)
        return
    if transfer != TransferOptions() or api_keys is not None:
        raise ConfigError(
            "--kv-transfer-config, --cluster-key and --api-key are for --peer URL, and --kv-store-config is for "
            "--store; give one of them, or leave the others out"
        )
    if memory:
        from outrider.cli.doctor_memory import show_memory

        config = replace(config, speculative_config=asked.speculation() if asked else given)
        show_memory(config, is_default=is_default, as_json=as_json)
        return
    if lossless and no_speculation:
        raise ConfigError("--lossless compares drafting with decoding without drafts; leave --no-speculation out")

    from outrider.tools.doctor.environment import look_at_environment

    report = Report(environment=look_at_environment())
    if not as_json:
        print_findings("environment", report.environment, only_trouble=asked is not None)
    if report.healthy:
        number = prompts or (LOSSLESS_PROMPTS if lossless else QUICK_PROMPTS)
        tokens = max_tokens or (LOSSLESS_TOKENS if lossless else QUICK_TOKENS)
        check = LosslessCheck(given=given, is_default=is_default, every=lossless, prompts=number, max_tokens=tokens)
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
    """The drafter that --drafter, --method and --speculative-config name."""

    def __init__(self, speculative: dict[str, Any] | None, *, method: str | None, drafter: str | None) -> None:
        self._speculative, self._method, self.drafter = speculative, method, drafter
        known = method or (speculative or {}).get("method")
        if known is not None:
            # Wrong options are refused before anything is loaded.
            self.speculation()

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
    """The drafter to compare with plain decoding, or None."""
    is_default: bool
    """Whether `given` is the drafter that `serve` uses where none is named."""
    every: bool
    """Whether to compare every drafter that works here."""
    prompts: int
    max_tokens: int


def _examine(
    report: Report, config: EngineConfig, asked: DrafterQuestion | None, check: LosslessCheck, *, as_json: bool
) -> None:
    """Fills the report in with the model, its drafters, and the comparison."""
    from outrider.engine.build import build_engine
    from outrider.tools.doctor.lossless import CheckPlan, check_prompts, compare_all
    from outrider.tools.doctor.model import look_at_drafter, look_at_model

    try:
        with loading() as progress:
            served = build_engine(replace(config, speculative_config=check.given), progress=progress)
        report.model += look_at_model(served, config.model)
    except ModelError as problem:
        if check.given is not None and _can_be_built(config):
            # The model can be loaded without the drafter, so the problem is the drafter's.
            raise
        report.model.append(Finding("model", str(problem), Status.PROBLEM, "choose another with --model"))
    if not as_json:
        print_findings("model", report.model, only_trouble=asked is not None)
    if not report.healthy or (asked is None and check.given is None):
        return
    plain = served if check.given is None else build_engine(config, model=served.model)
    if asked is not None:
        report.drafter = _diagnose(plain, asked)
        if not as_json:
            _print_diagnosis(report.drafter)
        if report.drafter.figures is None:
            return
        check = replace(check, given=asked.speculation(), is_default=False)
    # Where several drafters are compared, only one of them takes memory at a time.
    ready = None if check.is_default and check.every else served
    del served

    def build(speculation: SpeculativeConfig) -> Engine:
        changed = replace(config, speculative_config=speculation)
        if ready is not None and ready.config == changed:
            engine = ready
        else:
            engine = build_engine(changed, model=plain.model)
        report.drafters.append(look_at_drafter(engine, usual=check.is_default and speculation == check.given))
        return engine

    drafters = [
        (_label(speculation), partial(build, speculation))
        for speculation in _drafters(config.model, len(plain.model.spec.layers), check)
    ]
    plan = CheckPlan(prompts=check_prompts(check.prompts), max_tokens=check.max_tokens)
    with working("comparing") as report_progress:
        report.comparisons += compare_all(plain, drafters, plan, report_progress)
    if not as_json:
        print_findings("drafters", report.drafters)


def _diagnose(plain: Engine, asked: DrafterQuestion) -> DrafterReport:
    from outrider.tools.doctor.drafter import examine_drafter, refused

    try:
        speculation = asked.speculation()
    except ModelError as problem:
        return refused("unknown", asked.drafter or "", problem)
    with working("measuring acceptance") as report_progress:
        return examine_drafter(plain, speculation, report_progress)


def _can_be_built(config: EngineConfig) -> bool:
    from outrider.engine.build import build_engine

    try:
        build_engine(config)
    except ModelError:
        return False
    return True


def _drafters(model: str, layers: int, check: LosslessCheck) -> Iterator[SpeculativeConfig]:
    """Yields the drafters to compare: the given one or, for the long check without one, n-gram look-up, the drafters
    installed for the model, and the model's own first layers."""
    assert check.given is not None
    if not (check.is_default and check.every):
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


def _print_diagnosis(report: DrafterReport) -> None:
    if report.figures is not None:
        k = report.figures.k
        title = f"acceptance of {report.drafter} ({report.method}, {counted(k, 'draft')} per step)"
        out.print(Text(title, style="bold"), soft_wrap=True)
        out.print(_figures_table(report.figures))
        out.print()
    print_findings("diagnosis", [report.finding])


def _figures_table(figures: Figures) -> Table:
    table = Table(
        caption=f"{figures.chats} built-in chats, {figures.tokens:,} tokens, greedy",
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("")
    table.add_column("acceptance\nlength", justify="right")
    table.add_column("relative\nto cold", justify="right")
    table.add_column("target layers read")
    rows = [("from a warm prefix cache", figures.warm)]
    rows += [(f"layer ids {shift:+d}", figure) for shift, figure in figures.shifted.items()]
    rows.append(("layers reversed (chance level)", figures.chance))
    table.add_row("as it is, cold", f"{figures.cold:.2f}", "", _listed(figures.taps))
    for name, figure in rows:
        if figure is not None:
            table.add_row(name, f"{figure.length:.2f}", f"{figure.ratio - 1:+.1%}", _listed(figure.taps))
    return table


def _listed(taps: Sequence[int]) -> str:
    return ", ".join(map(str, taps)) or "none"


def _print_certificate(comparisons: Sequence[Comparison]) -> None:
    table = Table(
        title="with and without speculation, token for token",
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
