"""`outrider chat`: talk to a model in the terminal, and see what the drafter contributes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from outrider.api.cli.default_speculation import DRAFTS_COME_FROM, NoSpeculation, with_default_speculation
from outrider.api.cli.engine_options import EngineOptions, ModelOptions, chosen_model
from outrider.api.cli.grouped import grouped
from outrider.api.cli.sampling_options import CHAT_MAX_TOKENS, SamplingOptions
from outrider.api.cli.terminal import errors, interruptible, loading, out
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.api.cli.chat_session import ChatSession

INTERRUPTED_STATUS = 130
"""As shells have it for a command that Ctrl-C ended."""
PROBE_LIMIT_S = 0.5
"""Nobody should wait for the measurement of plain steps."""

CONVERSATION = "Conversation"
CHAT_HELP = (
    "Talk to a model.\n\n"
    f"{DRAFTS_COME_FROM} After each answer: tokens/s, the acceptance length, and the speed-up against plain steps "
    f"measured on the spot. An answer has at most {CHAT_MAX_TOKENS} tokens unless --max-tokens says otherwise.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider chat --show-drafts\n\n"
    '  outrider chat --once "Write a haiku about horses." --temperature 0.7\n\n'
    "  echo 'Name three rivers.' | outrider chat --no-speculation"
)
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/stats": "figures of the session",
    "/exit": "leave; Ctrl-D does the same",
}


@grouped
def chat(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    once: Annotated[
        str | None,
        typer.Option(help="Answer this and exit.", metavar="PROMPT", show_default=False, rich_help_panel=CONVERSATION),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="What the model is told first.", show_default=False, rich_help_panel=CONVERSATION),
    ] = None,
    show_drafts: Annotated[
        bool,
        typer.Option("--show-drafts", help="Colour tokens by where they came from.", rich_help_panel=CONVERSATION),
    ] = False,
    no_speculation: NoSpeculation = False,
    model: ModelOptions,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    name = chosen_model(positional, model)
    engine = with_default_speculation(engine, name, no_speculation=no_speculation)
    if once is not None and not once.strip():
        raise RequestError("--once needs a prompt; give at least one word")
    sampling.check()
    settings = model.settings() | engine.settings() | {"model": name}

    from outrider.api.cli.chat_session import ChatSession
    from outrider.api.llm import LLM

    with loading() as progress:
        llm = LLM(progress=progress, **settings)
        params = sampling.params(llm.engine.model.generation, max_tokens=CHAT_MAX_TOKENS)
        session = ChatSession(llm, params, system=system)
    if once is not None:
        _answer(session, once, show_drafts=show_drafts, once=True)
    else:
        _converse(session, show_drafts=show_drafts)


def _converse(session: ChatSession, *, show_drafts: bool) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        _greet(session)
    while True:
        try:
            line = _next_line(interactive)
        except KeyboardInterrupt:
            out.print("\nCtrl-D or /exit leaves", style="dim")
            continue
        if line is None or line == "/exit":
            break
        if line.startswith("/"):
            _command(session, line)
        elif line:
            try:
                _answer(session, line, show_drafts=show_drafts)
            except RequestError as problem:
                remedy = "; /reset forgets the conversation" if session.turns else ""
                errors.print(Text(f"error: {problem}{remedy}", style="red"), soft_wrap=True)
                if not interactive:
                    raise typer.Exit(1) from None
    if len(session.turns) > 1:
        _print_statistics(session)


def _greet(session: ChatSession) -> None:
    engine = session.llm.engine
    config = engine.config.speculative_config
    drafting = "no speculation" if config is None else f"{config.method} drafts up to {engine.k}"
    out.print(Text(engine.model.name, style="bold") + Text(f" · {drafting} · {engine.max_model_len:,} tokens"))
    out.print("Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.", style="dim")


def _next_line(interactive: bool) -> str | None:
    """What the person says; None at the end."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        import readline  # noqa: F401 - gives input() its editing keys and history
    except ImportError:
        pass
    try:
        return input("\n> ").strip()
    except EOFError:
        out.print()
        return None


def _command(session: ChatSession, line: str) -> None:
    if line == "/reset":
        session.reset()
        errors.print("the conversation is forgotten", style="dim")
    elif line == "/stats":
        _print_statistics(session)
    else:
        if line != "/help":
            errors.print(Text(f"unknown command {line}; there are:", style="red"))
        for name, meaning in COMMANDS.items():
            errors.print(f"  {name:8} {meaning}", style="dim")


def _print_statistics(session: ChatSession) -> None:
    from outrider.api.cli.chat_view import session_figures

    errors.print(session_figures(session), style="dim", soft_wrap=True)


def _answer(session: ChatSession, text: str, *, show_drafts: bool, once: bool = False) -> None:
    from outrider.api.cli.chat_view import AnswerView, print_figures

    view = AnswerView(show_drafts=show_drafts)
    if not session.turns:
        view.explain()
    turn = None
    with interruptible() as interruption:
        # One question has all the time there is for measuring plain steps, before it and behind it.
        growing = session.answer(text, probe_before=once)
        for turn in growing:
            view.show(turn.output.outputs[0])
            if interruption.wanted:
                growing.close()
                break
        assert turn is not None
        view.end(turn.output.outputs[0])
        if not interruption.wanted:
            session.measure_plain_steps(turn, limit_s=2.0 if once else PROBE_LIMIT_S)
    print_figures(turn)
    if once and interruption.wanted:
        raise typer.Exit(INTERRUPTED_STATUS)
