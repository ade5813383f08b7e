"""`outrider bench cluster`: what a cluster on this machine withstands, finds cached and costs."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.engine_options import AsJson
from outrider.cli.worker import require_dynamo
from outrider.errors import ConfigError

CLUSTER_BENCH_HELP = (
    "Measure clusters with the default model: [bold]kills[/bold] compares texts with one engine's while workers are "
    "killed at random, [bold]routing[/bold] compares what conversations find cached with KV-aware routing, in turns "
    "and on one worker, [bold]overhead[/bold] compares a cluster of one worker with outrider serve.\n\n"
    "It runs in a network namespace of its own, since Dynamo's event plane listens on all interfaces. kills exits with "
    "status 1 if a text is wrong, a request hangs, or pages are not given back."
)
KINDS = ("kills", "routing", "overhead")


def bench_cluster(
    kind: Annotated[str, typer.Argument(help="kills, routing or overhead.", metavar="KIND")],
    requests: Annotated[int, typer.Option(help="Requests of kills.")] = 200,
    kills: Annotated[int, typer.Option(help="Workers to kill.")] = 20,
    apart: Annotated[bool, typer.Option("--apart", help="Kill prefill and decode workers.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the moments of kills.")] = 1,
    conversations: Annotated[int, typer.Option(help="Conversations of routing.")] = 20,
    turns: Annotated[int, typer.Option(help="Turns of each conversation.")] = 6,
    concurrency: Annotated[str, typer.Option(help="Numbers of clients of overhead.")] = "1,4",
    rounds: Annotated[int, typer.Option(help="Times that overhead measures each server.")] = 5,
    directory: Annotated[Path | None, typer.Option(help="Directory to keep logs in.")] = None,
    as_json: AsJson = False,
) -> None:
    require_dynamo()
    if kind not in KINDS:
        raise ConfigError(f"there is no measurement {kind!r}; choose one of {', '.join(KINDS)}")
    from outrider.tools.fleet.network import enter_own_network

    enter_own_network("-m", "outrider", *sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as temporary:
        place, console = directory or Path(temporary), Console(highlight=False)
        if kind == "kills":
            _kills(console, place, requests, kills, seed, apart=apart, as_json=as_json)
        elif kind == "routing":
            _routing(console, place, conversations, turns, as_json=as_json)
        else:
            clients = [int(number) for number in concurrency.split(",")]
            _overhead(console, place, clients, rounds, as_json=as_json)


def _kills(console: Console, place: Path, requests: int, kills: int, seed: int, *, apart: bool, as_json: bool) -> None:
    from outrider.tools.fleet.kills import run_kills

    report = run_kills(place, requests=requests, kills=kills, seed=seed, apart=apart)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        console.print(
            f"{report.requests} requests, {report.kills} kills: {report.wrong} wrong texts, {report.hangs} hangs, "
            f"{sum(report.failures.values())} errors; {report.moved} requests went on elsewhere, longest gap "
            f"{1000 * report.longest_gap_s:.0f} ms; left behind: {report.left or 'nothing'}"
        )
        for error, count in report.failures.items():
            console.print(f"  {count} × {error}", markup=False)
    if not report.is_right:
        raise typer.Exit(1)


def _routing(console: Console, place: Path, conversations: int, turns: int, *, as_json: bool) -> None:
    from outrider.tools.fleet.routing import run_routing

    results = run_routing(place, conversations=conversations, turns=turns)
    if as_json:
        print(json.dumps([result.as_json() for result in results]))
        return
    table = Table("router", "workers", "cached", "of one worker's", "TTFT ms", "busiest worker", box=None)
    alone = results[0].hit_rate
    for result in results:
        of_alone = result.hit_rate / alone if alone else 0.0
        table.add_row(
            result.router,
            str(result.workers),
            f"{result.hit_rate:.1%}",
            f"{of_alone:.1%}",
            f"{1000 * result.ttft_s:.0f}",
            f"{result.busiest_share:.0%}",
        )
    console.print(table)


def _overhead(console: Console, place: Path, clients: list[int], rounds: int, *, as_json: bool) -> None:
    from outrider.tools.fleet.overhead import run_overhead

    results = run_overhead(place, at_a_time=clients, rounds=rounds)
    if as_json:
        print(json.dumps([result.as_json() for result in results]))
        return
    table = Table("clients", "serve, tokens/s", "cluster", "ratio", "serve, TTFT ms", "cluster", "later", box=None)
    for result in results:
        table.add_row(
            str(result.at_a_time),
            f"{result.direct_tokens_s:.0f}",
            f"{result.cluster_tokens_s:.0f}",
            f"{result.ratio:.3f}",
            f"{1000 * result.direct_ttft_s:.1f}",
            f"{1000 * result.cluster_ttft_s:.1f}",
            f"{1000 * result.later_s:+.1f}",
        )
    console.print(table)
