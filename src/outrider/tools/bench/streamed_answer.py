"""One streamed answer of a server that speaks OpenAI's API: when its tokens came, how many there were, what was wrong.

    TTFT    from sending the request to the first event that has text
    TPOT    (time of the last event that has text − time of the first one) / (tokens − 1)

While answers stream, their lines are only kept with their times; they are read when the run has ended, so that the
client takes as little as possible of a processor that it may share with the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from outrider.tools.bench.http_client import Client

DATA = b"data:"
DONE = b"[DONE]"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat's event that hold what the model wrote."""
MESSAGE_MAX = 300
"""Most characters of a server's error message that are reported."""


@dataclass(slots=True)
class Recorded:
    """What arrived, unread."""

    sent_s: float
    status: int = 0
    """Status of the answer; 0 if there was none."""
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    """Lines of the event stream that have data, and when they came."""
    refusal: str = ""
    """Body of an answer whose status is not 200."""
    problem: str = ""
    """What ended the connection early."""
    ended_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    sent_s: float
    ended_s: float
    ttft_s: float | None = None
    """None if no event had text."""
    tpot_s: float | None = None
    """None if there are fewer than two tokens, or fewer than two events with text."""
    tokens: int = 0
    counted_by_server: bool = False
    """Whether the server said how many tokens there are; otherwise events with text are counted."""
    text: str = ""
    failure: str | None = None
    """Kind of failure; None if the answer is complete."""
    detail: str = ""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.sent_s

    def tokens_until(self, at_s: float) -> float:
        """Returns about how many tokens had come by then: one with the first text, the others evenly from then on."""
        if at_s >= self.ended_s:
            return self.tokens
        if self.ttft_s is None or at_s < self.sent_s + self.ttft_s:
            return 0.0
        first_s = self.sent_s + self.ttft_s
        return 1.0 + (self.tokens - 1) * (at_s - first_s) / (self.ended_s - first_s)


def record(client: Client, path: str, body: Mapping[str, Any]) -> Recorded:
    """Sends a request and keeps what comes back; whatever goes wrong is recorded too."""
    recorded = Recorded(time.perf_counter())
    try:
        answer = client.send("POST", path, json.dumps({**body, "stream": True}).encode())
        recorded.status = answer.status
        if answer.status != 200:
            recorded.refusal = answer.read().decode(errors="replace")
        else:
            for line in answer:
                if line.startswith(DATA):
                    recorded.lines.append((time.perf_counter(), line))
    except TimeoutError:
        recorded.problem = "no answer in time"
        client.close()
    except (OSError, HTTPException) as problem:
        recorded.problem = f"{type(problem).__name__}: {problem}"
        client.close()
    recorded.ended_s = time.perf_counter()
    return recorded


def read(recorded: Recorded) -> Answer:
    """Returns what a recorded answer amounts to."""
    if recorded.status == 0:
        return _failed(recorded, "no answer", recorded.problem)
    if recorded.status != 200:
        return _failed(recorded, f"status {recorded.status}", error_message(recorded.refusal))
    text_times: list[float] = []
    texts: list[str] = []
    counted: int | None = None
    complete = False
    for at_s, line in recorded.lines:
        data = line[len(DATA) :].strip()
        if data == DONE:
            complete = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            return _failed(recorded, "malformed event", data.decode(errors="replace"))
        if not isinstance(event, dict):
            return _failed(recorded, "malformed event", data.decode(errors="replace"))
        if event.get("error"):
            return _failed(recorded, "error in the stream", error_message(data.decode(errors="replace")))
        text = text_of(event)
        if text:
            text_times.append(at_s)
            texts.append(text)
        counted = _counted_tokens(event, counted)
    if recorded.problem:
        return _failed(recorded, "stream cut off", recorded.problem)
    if not complete:
        return _failed(recorded, "stream cut off", "it ended without [DONE]")
    tokens = len(text_times) if counted is None else counted
    if tokens < 1:
        return _failed(recorded, "no tokens", "the answer is complete, but empty")
    spread_s = text_times[-1] - text_times[0] if len(text_times) > 1 else None
    return Answer(
        sent_s=recorded.sent_s,
        ended_s=text_times[-1] if text_times else recorded.ended_s,
        ttft_s=text_times[0] - recorded.sent_s if text_times else None,
        tpot_s=spread_s / (tokens - 1) if spread_s is not None and tokens > 1 else None,
        tokens=tokens,
        counted_by_server=counted is not None,
        text="".join(texts),
    )


def text_of(event: Mapping[str, Any]) -> str:
    """Returns the text that an event of either route brings: of the answer, its reasoning, or a tool call."""
    found = ""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else {}
        for part in (choice.get("text"), *(parts.get(name) for name in TEXT_FIELDS)):
            if part:
                found += part if isinstance(part, str) else json.dumps(part)
    return found


def _counted_tokens(event: Mapping[str, Any], before: int | None) -> int | None:
    usage = event.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else before


def _failed(recorded: Recorded, kind: str, detail: str) -> Answer:
    return Answer(sent_s=recorded.sent_s, ended_s=recorded.ended_s, failure=kind, detail=detail[:MESSAGE_MAX])


def error_message(body: str) -> str:
    """Returns the message in an error's body, whichever of the usual forms it has; else the beginning of the body."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if isinstance(value, dict):
        error = value.get("error", value)
        for found in (error.get("message") if isinstance(error, dict) else error, value.get("detail")):
            if isinstance(found, str) and found:
                return found[:MESSAGE_MAX]
    return " ".join(body.split())[:MESSAGE_MAX] or "the answer has no text"
