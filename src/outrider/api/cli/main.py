"""The `outrider` command: registers the sub-commands and turns our errors into one readable line."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from outrider import __version__
from outrider.api.cli.bench import bench_app
from outrider.api.cli.chat import CHAT_HELP, chat
from outrider.api.cli.commands import dressed
from outrider.api.cli.doctor import DOCTOR_HELP, doctor
from outrider.api.cli.generate import GENERATE_HELP, generate
from outrider.api.cli.serve import SERVE_HELP, serve
from outrider.api.cli.sim import SIM_HELP, sim
from outrider.api.cli.train import train_app
from outrider.errors import OutriderError

# The status typer itself uses for a command that was called wrongly.
USAGE_EXIT_STATUS = 2

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
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


app.command("chat", help=CHAT_HELP)(chat)
app.command("generate", help=GENERATE_HELP)(generate)
app.command("serve", help=SERVE_HELP)(serve)
app.command("doctor", help=DOCTOR_HELP)(doctor)
app.command("sim", help=SIM_HELP)(sim)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
dressed(app)


def main() -> None:
    """Run the command line; the entry point of the `outrider` script."""
    try:
        app()
    except OutriderError as error:
        # One line whatever the message holds: no wrapping, and no markup read into user text.
        message = " ".join(str(error).splitlines())
        Console(stderr=True).print(Text(f"error: {message}", style="red"), soft_wrap=True)
        raise SystemExit(USAGE_EXIT_STATUS) from None
