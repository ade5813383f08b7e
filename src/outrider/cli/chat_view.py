"""How an answer is shown: text as it is generated, tokens coloured by origin, one line of statistics."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.text import Text

from outrider.cli.chat_session import ChatSession, Turn
from outrider.cli.terminal import acceptance, errors, out
from outrider.engine.outputs import CompletionOutput, Origin

STYLES = {Origin.ACCEPTED: "bold green", Origin.CORRECTED: "yellow", Origin.BONUS: "cyan", Origin.PLAIN: ""}
MARKS = {Origin.ACCEPTED: "+", Origin.CORRECTED: "x", Origin.BONUS: "*", Origin.PLAIN: "."}
MEANING = {
    Origin.ACCEPTED: "accepted draft",
    Origin.CORRECTED: "correction of a draft",
    Origin.BONUS: "bonus after a whole draft",
    Origin.PLAIN: "no draft",
}


class AnswerView:
    """Prints the part of a growing answer that is new."""

    def __init__(self, *, show_drafts: bool) -> None:
        self._show_drafts = show_drafts
        self._coloured = show_drafts and out.is_terminal and out.color_system is not None and not out.no_color
        self._token = self._in_piece = self._characters = 0

    def explain(self) -> None:
        """Prints what the colours mean."""
        if self._show_drafts:
            out.print(legend(coloured=self._coloured), soft_wrap=True)
            out.print()

    def show(self, answer: CompletionOutput) -> None:
        for text, origin in self.new_text(answer):
            if self._coloured:
                out.print(Text(text, style=STYLES[origin]), end="", soft_wrap=True)
            else:
                typer.echo(text, nl=False)
        out.file.flush()

    def new_text(self, answer: CompletionOutput) -> Iterator[tuple[str, Origin]]:
        """Yields the text since the last call, token by token. Text that may be part of a stop string is held back."""
        while self._characters < len(answer.text):
            room = len(answer.text) - self._characters
            if self._token < len(answer.pieces):
                origin = answer.origins[self._token]
                rest = answer.pieces[self._token][self._in_piece :]
            else:
                # The last bytes of a text that ends inside a character belong to no token's piece.
                origin, rest = answer.origins[-1], answer.text[self._characters :]
            part = rest[:room]
            if part:
                yield part, origin
            self._characters += len(part)
            if len(part) < len(rest):
                self._in_piece += len(part)
            else:
                self._token, self._in_piece = self._token + 1, 0

    def end(self, answer: CompletionOutput) -> None:
        typer.echo()
        if self._show_drafts and not self._coloured:
            typer.echo(f"\ntoken by token: {''.join(MARKS[origin] for origin in answer.origins)}")


def legend(*, coloured: bool) -> Text:
    parts: list[Text] = []
    for origin, meaning in MEANING.items():
        if coloured:
            parts.append(Text(meaning, style=STYLES[origin]))
        else:
            parts.append(Text(f"{MARKS[origin]} {meaning}"))
    return Text("tokens: ", style="dim" if coloured else "") + Text(" · ").join(parts)


def figures(turn: Turn) -> str:
    """Returns one line about one answer."""
    metrics = turn.output.metrics
    # The speed-up compares steps, so the speed next to it excludes the time of the prompt.
    first_s = (metrics.first_token_s or metrics.arrival_s) - metrics.arrival_s
    rest_s = turn.seconds - first_s
    parts = [
        f"{turn.tokens} tokens in {turn.seconds:.2f} s, the first after {first_s:.2f} s",
        f"{(turn.tokens - 1) / rest_s:.1f} tokens/s after that" if turn.tokens > 1 and rest_s > 0 else None,
        acceptance(metrics.speculation),
        speed_up(turn),
        f"{metrics.cached_tokens} of {len(turn.output.prompt_token_ids)} prompt tokens cached",
        {"length": "cut off at the length limit", "abort": "stopped"}.get(turn.output.outputs[0].finish_reason or ""),
    ]
    return " · ".join(part for part in parts if part)


def speed_up(turn: Turn) -> str | None:
    if turn.speed_up is None or turn.plain_step_s is None:
        return None
    return f"{turn.speed_up:.1f}× as fast as steps without drafts ({1000 * turn.plain_step_s:.1f} ms)"


def print_figures(turn: Turn) -> None:
    errors.print(figures(turn), style="dim", soft_wrap=True)


def session_figures(session: ChatSession) -> str:
    """Returns several lines about all answers so far."""
    turns, counts, engine = session.turns, session.speculation, session.llm.engine
    if not turns:
        return "no answers yet"
    tokens, seconds = sum(turn.tokens for turn in turns), sum(turn.seconds for turn in turns)
    prompt = sum(len(turn.output.prompt_token_ids) for turn in turns)
    cached = sum(turn.output.metrics.cached_tokens for turn in turns)
    last = turns[-1]
    context = len(last.output.prompt_token_ids) + last.tokens
    lines = [
        f"answers          {len(turns)}",
        f"tokens           {tokens:,} in {seconds:.1f} s, {tokens / seconds if seconds else 0.0:.1f} tokens/s",
        f"prompt tokens    {prompt:,}, of which {cached:,} from the prefix cache",
        f"context          {context:,} of {engine.max_model_len:,} tokens",
    ]
    if counts.drafts:
        lines.append(
            f"drafts           {counts.accepted_tokens:,} of {counts.draft_tokens:,} accepted, "
            f"acceptance length {counts.mean_acceptance_length:.2f}"
        )
        rates = [f"{number / counts.drafts:.0%}" for number in counts.accepted_at]
        lines.append(f"  by position    {' '.join(rates)}")
    measured = [turn for turn in turns if turn.speed_up is not None]
    if measured:
        plain = sum((turn.plain_step_s or 0.0) * turn.times.tokens for turn in measured)
        taken = sum(turn.times.typical_s for turn in measured)
        lines.append(f"speed-up         {plain / taken:.1f}× as fast as steps without drafts")
    return "\n".join(lines)
