"""`outrider chat`: a conversation in the terminal that shows what the drafter contributes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from outrider.cli.drafter_options import DRAFTS_COME_FROM, NoSpeculation, with_default_speculation
from outrider.cli.engine_options import EngineOptions, ModelOptions, PositionalModel, chosen_model
from outrider.cli.grouped import grouped, panel
from outrider.cli.main import INTERRUPTED_EXIT_STATUS
from outrider.cli.sampling_options import CHAT_MAX_TOKENS, SamplingOptions
from outrider.cli.terminal import errors, interruptible, loading, out
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.cli.chat_session import ChatSession

PROBE_LIMIT_S = 0.5
"""Longest time between an answer and the next question that is spent on measuring steps without drafts."""

conversation_option = panel("Conversation")
CHAT_HELP = (
    "Talk to a model.\n\n"
    f"{DRAFTS_COME_FROM} After each answer it prints tokens/s, the acceptance length, and the speed-up over steps "
    f"without drafts, measured on the spot. An answer has at most {CHAT_MAX_TOKENS} tokens unless --max-tokens says "
    "otherwise.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider chat --show-drafts\n\n"
    '  outrider chat --once "Write a haiku about horses." --temperature 0.7\n\n'
    "  echo 'Name three rivers.' | outrider chat --no-speculation"
)
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/stats": "statistics of the session",
    "/exit": "leave; Ctrl-D does the same",
}


@grouped
def chat(
    *,
    positional: PositionalModel = None,
    once: Annotated[str | None, conversation_option(help="Answer one prompt and exit.", metavar="PROMPT")] = None,
    system: Annotated[str | None, conversation_option(help="System prompt.")] = None,
    show_drafts: Annotated[
        bool, conversation_option("--show-drafts", help="Colour tokens by where they came from.")
    ] = False,
    sampling: SamplingOptions,
    model: ModelOptions,
    no_speculation: NoSpeculation = False,
    engine: EngineOptions,
) -> None:
    name = chosen_model(positional, model)
    engine = with_default_speculation(engine, name, no_speculation=no_speculation)
    if once is not None and not once.strip():
        raise RequestError("--once needs a prompt; give at least one word")
    sampling.check()
    settings = model.settings() | engine.settings() | {"model": name}

    from outrider.api.llm import LLM
    from outrider.cli.chat_session import ChatSession

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
    if engine.pacer is not None:
        drafting += ", as many as pay"
    out.print(Text(engine.model.name, style="bold") + Text(f" · {drafting} · {engine.max_model_len:,} tokens"))
    out.print("Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.", style="dim")


def _next_line(interactive: bool) -> str | None:
    """Returns the user's next line; None at the end of the input."""
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
        errors.print("the conversation has been forgotten", style="dim")
    elif line == "/stats":
        _print_statistics(session)
    else:
        if line != "/help":
            errors.print(Text(f"unknown command {line}; the commands are:", style="red"))
        for name, meaning in COMMANDS.items():
            errors.print(f"  {name:8} {meaning}", style="dim")


def _print_statistics(session: ChatSession) -> None:
    from outrider.cli.chat_view import session_figures

    errors.print(session_figures(session), style="dim", soft_wrap=True)


def _answer(session: ChatSession, text: str, *, show_drafts: bool, once: bool = False) -> None:
    from outrider.cli.chat_view import AnswerView, print_figures

    view = AnswerView(show_drafts=show_drafts)
    if not session.turns:
        view.explain()
    turn = None
    with interruptible() as interruption:
        # With a single question there is time to measure steps without drafts both before and after it.
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
        raise typer.Exit(INTERRUPTED_EXIT_STATUS)
