"""`outrider sim`: the simulation from the command line."""

from __future__ import annotations

import json
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.cli.sim_demo import show_demo
from outrider.cli.sim_pacing import show_pacing
from outrider.cli.terminal import errors, progress_bar
from outrider.errors import ConfigError
from outrider.tools.sim.campaign import SITUATIONS, Tally, run_campaign
from outrider.tools.sim.drawing import draw
from outrider.tools.sim.mutation import PACE
from outrider.tools.sim.mutation_table import MUTATIONS, mutation_named
from outrider.tools.sim.mutations import MutationResult, try_mutation, try_on_machines
from outrider.tools.sim.replay import Trace, record, replay, shrink
from outrider.tools.sim.scenario import PHASE_FAULTS, PHASES, phase_fault
from outrider.tools.wording import counted

console = Console()

# Given as text, since typer would keep the line breaks of a docstring.
SIM_HELP = (
    "Run the real scheduler and KV manager in a simulated world, under faults.\n\n"
    "A fake model computes from slot values, so that a wrong slot is a wrong token. Outputs are compared with an "
    "oracle token for token, the sanitizer checks every read and write, and pages are counted at the end.\n\n"
    "Exit status: 0 if no check failed, 1 if one did (with --mutate or --replay: if the failure was reproduced), 2 if "
    "the command was called wrongly. A failing run leaves a trace file, which --replay repeats."
)

MUTATION_NAMES = [mutation.name for mutation in MUTATIONS]


def _mutation_name(given: str | None) -> str | None:
    if given is None or given in MUTATION_NAMES:
        return given
    near = get_close_matches(given, MUTATION_NAMES, n=2, cutoff=0.6)
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else "`outrider sim --mutations` runs them all and shows their names"
    )
    raise typer.BadParameter(f"there is no mutation {given!r}; {hint}")


def sim(
    seed: Annotated[int, typer.Option(help="Scenarios are drawn from this seed.")] = 1,
    scenarios: Annotated[int, typer.Option(min=1, help="How many scenarios to run.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    mutations: Annotated[
        bool,
        typer.Option("--mutations", help="Put known bugs back, one at a time, and show which invariant catches each."),
    ] = False,
    mutate: Annotated[
        str | None,
        typer.Option(
            help="Put one bug back and run until it is noticed. --mutations runs all and shows their names.",
            metavar="NAME",
            callback=_mutation_name,
        ),
    ] = None,
    replay_file: Annotated[
        Path | None, typer.Option("--replay", help="Repeat the run that a trace file describes.", metavar="FILE")
    ] = None,
    shrink_it: Annotated[
        bool, typer.Option("--shrink", help="Make the failing scenario as small as possible.")
    ] = False,
    trace_dir: Annotated[Path, typer.Option(help="Directory for the trace of a failing run.")] = Path(),
    processes: Annotated[int, typer.Option(min=0, help="Number of worker processes; 0 means one for each core.")] = 0,
    pacing: Annotated[
        bool,
        typer.Option(
            "--pacing",
            help="On synthetic machines, compare the pacer with fixed numbers of drafts and with an oracle.",
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="With --pacing: number of seeds to run, from --seed on.")] = 1,
    demo: Annotated[
        bool, typer.Option("--demo", help="Show one run step by step, then a campaign, then a bug that is caught.")
    ] = False,
) -> None:
    chosen = [
        name
        for name, given in (
            ("--replay", replay_file is not None),
            ("--mutations", mutations),
            ("--mutate", mutate is not None),
            ("--pacing", pacing),
            ("--demo", demo),
        )
        if given
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} do different things; give one of them")
    if as_json and (demo or mutate is not None):
        raise ConfigError(f"{chosen[0]} is for people to read; leave --json out")
    if not trace_dir.is_dir():
        raise ConfigError(f"--trace-dir {trace_dir} is not a directory; create it first")
    if replay_file is not None:
        _replay(replay_file, shrink_it, as_json)
    elif mutations:
        _mutations(seed, as_json)
    elif pacing:
        if not show_pacing(console, range(seed, seed + seeds), processes=processes, as_json=as_json):
            raise typer.Exit(1)
    elif demo:
        if not show_demo(console, seed):
            raise typer.Exit(1)
    elif mutate is not None:
        _mutate(mutate, seed, scenarios, trace_dir, shrink_it)
    else:
        _campaign(seed, scenarios, processes, as_json, trace_dir, shrink_it)


def _campaign(seed: int, scenarios: int, processes: int, as_json: bool, trace_dir: Path, shrink_it: bool) -> None:
    with progress_bar() as progress:
        task = progress.add_task("scenarios", total=scenarios)
        tally = run_campaign(seed, scenarios, processes=processes, progress=lambda count: progress.advance(task, count))
    trace_file = None
    if tally.failures:
        index = tally.failures[0][0]
        path = trace_dir / f"sim-seed{seed}-{index}.json"
        _trace, trace_file = _write_trace(record(draw(seed, index))[1], path, shrink_it)
    if as_json:
        result = tally.as_json() | ({"trace": str(trace_file)} if trace_file else {})
        print(json.dumps(result))
    else:
        _print_tally(seed, tally, trace_file)
    if tally.failures:
        raise typer.Exit(1)


def _write_trace(trace: Trace, path: Path, shrink_it: bool) -> tuple[Trace, Path]:
    """Write the trace, made small if asked for. Returns the trace that was written, and its path."""
    if shrink_it:
        with errors.status("shrinking"):
            trace = shrink(trace)
        path = path.with_suffix(".small.json")
    trace.write(path)
    return trace, path


def _say_how_to_repeat(path: Path) -> None:
    command = f"outrider sim --replay {shlex.quote(str(path))}"
    console.print(f"Its trace is in {path}; to repeat it: {command}", soft_wrap=True, markup=False, highlight=False)


def _print_tally(seed: int, tally: Tally, trace_file: Path | None) -> None:
    counts = tally.as_json()
    title = f"seed {seed}: {counted(tally.scenarios, 'scenario')}"
    table = Table(title=title, show_header=False, title_justify="left")
    for name in (
        "steps",
        "requests_finished",
        "tokens",
        "draft_tokens",
        "accepted_tokens",
        "steps_per_second",
        "seconds",
    ):
        table.add_row(name.replace("_", " "), f"{counts[name]:,}")
    table.add_section()
    for name in ("violations", "wrong_outputs", "leaked_pages", "hit_mismatches", "stuck", "crashes"):
        style = "bold red" if counts[name] else "green"
        table.add_row(name.replace("_", " "), f"{counts[name]:,}", style=style)
    console.print(table)
    faults = Table(title="situations reached", show_header=False, title_justify="left")
    for name in SITUATIONS:
        faults.add_row(name.replace("_", " "), f"{tally.faults[name]:,}")
    console.print(faults)
    console.print(_phase_table(tally))
    for index, failure in tally.failures[:5]:
        console.print(f"[red]scenario {index}[/red]: {escape(failure.message)}")
    if trace_file is not None:
        _say_how_to_repeat(trace_file)


def _phase_table(tally: Tally) -> Table:
    """Returns how often each fault befell a hand-off in each of its phases."""
    title = "faults by phase of the hand-off (P: of its prefill worker, D: of its decode worker)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for phase in PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
    for kind, side in dict.fromkeys((kind, side) for kind, _phase, side in PHASE_FAULTS):
        known = [phase for other, phase, its_side in PHASE_FAULTS if (other, its_side) == (kind, side)]
        counts = [f"{tally.faults[phase_fault(kind, phase, side)]:,}" if phase in known else "" for phase in PHASES]
        table.add_row(f"{kind} {side[0].upper()}" if side else kind, *counts)
    return table


def _mutations(seed: int, as_json: bool) -> None:
    results: list[MutationResult] = []
    with progress_bar() as progress:
        task = progress.add_task("mutations", total=len(MUTATIONS))
        for mutation in MUTATIONS:
            results.append(try_mutation(mutation, seed))
            progress.advance(task)
    if as_json:
        print(json.dumps([result.as_json() for result in results]))
    else:
        table = Table(title="bugs put back, and what noticed them", title_justify="left")
        for column in ("bug", "report", "breaks", "caught by", "steps"):
            table.add_column(
                column, justify="right" if column == "steps" else "left", no_wrap=column != "bug", overflow="fold"
            )
        for result in results:
            mutation = result.mutation
            verdict = (
                f"[green]{result.invariant}[/green]" if result.caught else f"[red]{result.invariant or 'nothing'}[/red]"
            )
            table.add_row(mutation.name, mutation.lineage, mutation.invariant, verdict, str(result.steps))
        console.print(table)
        caught = sum(result.caught for result in results)
        console.print(
            f"{caught} of {len(results)} caught by the invariant they break, each in a run that passes without it.\n"
            "report: the row of docs/lineage.md that the bug re-enacts; steps: the length of the run that caught it."
        )
        for result in results:
            if not result.caught:
                console.print(f"[red]{result.mutation.name}[/red]: {escape(result.message)}")
    if not all(result.caught for result in results):
        raise typer.Exit(1)


def _mutate(name: str, seed: int, scenarios: int, trace_dir: Path, shrink_it: bool) -> None:
    mutation = mutation_named(name)
    if mutation is not None and mutation.invariant == PACE:
        tried = try_on_machines(mutation, seed)
        console.print(f"[red]{tried.invariant}[/red]: {escape(tried.message)}" if tried.caught else tried.message)
        raise typer.Exit(1 if tried.caught else 0)
    for index in range(scenarios):
        result, trace = record(draw(seed, index), name)
        if result.failure is None:
            continue
        trace, path = _write_trace(trace, trace_dir / f"sim-{name}-{index}.json", shrink_it)
        assert trace.failure is not None
        console.print(f"[red]scenario {index}[/red]: {escape(trace.failure.message)}")
        _say_how_to_repeat(path)
        raise typer.Exit(1)
    console.print(f"{counted(scenarios, 'scenario')} did not notice {name}; try more of them with --scenarios")


def _replay(path: Path, shrink_it: bool, as_json: bool) -> None:
    trace = Trace.read(path)
    result, exact = replay(trace)
    if shrink_it and exact and trace.failure is not None:
        trace, path = _write_trace(trace, path, True)
        result, exact = replay(trace)
    failure = result.failure
    if as_json:
        summary = {
            "exact": exact,
            "steps": result.steps,
            "requests": len(trace.scenario.requests),
            "digest": result.digest,
            "invariant": failure.invariant if failure else None,
            "message": failure.message if failure else None,
            "file": str(path),
        }
        print(json.dumps(summary))
    else:
        verdict = "[green]the same run, step for step[/green]" if exact else "[bold red]NOT the same run[/bold red]"
        size = f"{counted(result.steps, 'step')}, {counted(len(trace.scenario.requests), 'request')}"
        console.print(f"{verdict} ({size})")
        console.print(escape(failure.message) if failure else "nothing went wrong")
        if shrink_it:
            _say_how_to_repeat(path)
    if not exact or failure is not None:
        raise typer.Exit(1)
