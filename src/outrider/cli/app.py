"""The commands of `outrider`, and how an error ends one: with a single line on standard error."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from outrider import __version__
from outrider.cli.bench import bench_app
from outrider.cli.chat import CHAT_HELP, chat
from outrider.cli.cluster import CLUSTER_HELP, cluster
from outrider.cli.commands import install_command_classes
from outrider.cli.doctor import DOCTOR_HELP, doctor
from outrider.cli.generate import GENERATE_HELP, generate
from outrider.cli.output import CheckedOutput
from outrider.cli.proxy import PROXY_HELP, proxy
from outrider.cli.serve import SERVE_HELP, serve
from outrider.cli.sim import SIM_HELP, sim
from outrider.cli.train import train_app
from outrider.cli.worker import WORKER_HELP, worker
from outrider.errors import OutputError, OutriderError

# The status typer itself uses for a command that was called wrongly.
USAGE_EXIT_STATUS = 2
OUTPUT_FAILED_EXIT_STATUS = 1

app = typer.Typer(
    name="outrider",
    help="LLM inference built around speculative decoding.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    # An unexpected exception is our bug: its plain traceback is what a report needs.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("chat", help=CHAT_HELP)(chat)
app.command("generate", help=GENERATE_HELP)(generate)
app.command("serve", help=SERVE_HELP)(serve)
app.command("proxy", help=PROXY_HELP)(proxy)
app.command("cluster", help=CLUSTER_HELP)(cluster)
app.command("worker", help=WORKER_HELP)(worker)
app.command("doctor", help=DOCTOR_HELP)(doctor)
app.command("sim", help=SIM_HELP)(sim)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
install_command_classes(app)


def run() -> None:
    """Runs the command that `sys.argv` names; ends with SystemExit."""
    stdout = sys.stdout
    if stdout is not None:
        sys.stdout = CheckedOutput(stdout)
    try:
        try:
            app()
        finally:
            if stdout is not None:
                # What is still buffered would otherwise fail only while the interpreter shuts down.
                sys.stdout.flush()
    except OutputError as error:
        # The interpreter flushes once more at its end; that flush has to succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        _print_error(error)
        raise SystemExit(OUTPUT_FAILED_EXIT_STATUS) from None
    except OutriderError as error:
        _print_error(error)
        raise SystemExit(USAGE_EXIT_STATUS) from None
    finally:
        sys.stdout = stdout


def _print_error(error: OutriderError) -> None:
    # One line whatever the message holds: no wrapping, and no markup read into user text.
    message = " ".join(str(error).splitlines())
    with suppress(OSError):
        Console(stderr=True).print(Text(f"error: {message}", style="red"), soft_wrap=True)
