"""`outrider cluster`: a front end and several workers on this machine, in one command."""

from __future__ import annotations

import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.cli.terminal import errors
from outrider.cli.worker import require_dynamo
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.cluster.members import Member
    from outrider.cluster.supervisor import Supervisor

CLUSTER_HELP = (
    "Run several workers on this machine behind one address, with NVIDIA Dynamo in front.\n\n"
    "Requests go to the worker that has most of their prompt cached; a request whose worker dies goes on with another "
    "one; what dies is started again. SIGTERM and Ctrl-C let running requests finish. Dynamo's event plane listens on "
    "all interfaces: run this where no stranger reaches the machine's ports.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider cluster --replicas 2\n\n"
    "  outrider cluster --prefill 2 --decode 2 --port 9000\n\n"
    "  outrider cluster cluster.yaml"
)


def cluster(
    file: Annotated[Path | None, typer.Argument(help="YAML file with the cluster's settings.", metavar="FILE")] = None,
    replicas: Annotated[int | None, typer.Option(help="Number of workers that do everything.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of workers that compute prompts.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of workers that write answers.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, as for outrider serve.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [dim]\\[default: 127.0.0.1][/dim]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. [dim]\\[default: 8000][/dim]")] = None,
    router: Annotated[str | None, typer.Option(help="How a worker is chosen: kv, round-robin, random, …")] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="Directory for logs and for what the processes share. Default: one that goes at the end."),
    ] = None,
) -> None:
    require_dynamo()
    from outrider.cluster.plan import ClusterPlan
    from outrider.cluster.supervisor import Supervisor

    options: dict[str, Any] = {
        "replicas": replicas,
        "prefill": prefill,
        "decode": decode,
        "model": model,
        "host": host,
        "port": port,
        "router": router,
    }
    given = {name: value for name, value in options.items() if value is not None}
    plan = ClusterPlan(**given) if file is None else ClusterPlan.read(file, **given)
    with ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-cluster-")))
        elif (directory / "cluster.json").exists() and any((directory / "discovery").glob("v1/instances/*")):
            raise ConfigError(f"{directory} is another cluster's, or was not ended in order; choose another one")
        directory.mkdir(parents=True, exist_ok=True)
        live = Live(console=errors, auto_refresh=False) if sys.stderr.isatty() else None
        supervisor = Supervisor(
            plan, directory, on_change=lambda what: errors.print(Text(what), soft_wrap=True, highlight=False)
        )
        errors.print(Text(f"logs are in {directory / 'logs'}"), soft_wrap=True, highlight=False)
        if live is not None:
            stack.enter_context(live)
        ended = threading.Event()
        thread = threading.Thread(target=_show, args=(supervisor, live, ended), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        supervisor.run()


def _show(supervisor: Supervisor, live: Live | None, ended: threading.Event) -> None:
    announced = False
    while not ended.wait(1.0):
        if not announced and supervisor.is_ready:
            announced = True
            text = f"serving at {supervisor.url}/v1 with {len(supervisor.workers)} workers"
            errors.print(Text(text, style="bold"), soft_wrap=True, highlight=False)
        if live is not None:
            live.update(screen(supervisor.members), refresh=True)


def screen(members: list[Member]) -> Table:
    """Returns what runs, as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("process", "state", "requests", "running", "prompt tokens", "cached", "from peers", "accepted", "KV"):
        table.add_column(name, justify="left" if name in ("process", "state") else "right")
    table.add_column("restarts", justify="right")
    for member in members:
        figures = member.figures
        cells = [""] * 7
        if figures:
            prompt, steps = figures.get("prompt_tokens", 0.0), figures.get("draft_steps", 0.0)
            cells = [
                f"{figures.get('requests', 0):.0f}",
                f"{figures.get('running_requests', 0):.0f}",
                f"{prompt:,.0f}",
                f"{figures.get('cached_tokens', 0) / prompt:.0%}" if prompt else "",
                f"{figures.get('transferred_tokens', 0) / prompt:.0%}" if prompt else "",
                f"{1 + figures.get('accepted_tokens', 0) / steps:.2f}" if steps else "",
                f"{figures.get('kv_usage', 0):.0%}",
            ]
        style = {"serves": "green", "starts": "yellow"}.get(member.state, "red")
        state = "" if member.role == "stand-in" and member.state == "starts" else member.state
        table.add_row(member.name, Text(state, style=style), *cells, str(member.restarts or ""))
    return table
