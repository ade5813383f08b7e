"""A client of the cluster that notes when each piece of an answer came."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "smollm2-135m-instruct"
REQUEST_LIMIT_S = 120.0
Message = dict[str, str]


@dataclass(slots=True)
class Streamed:
    """One answer."""

    text: str = ""
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sent_s: float = 0.0
    at_s: list[float] = field(default_factory=list)
    """When each event with text came."""

    @property
    def ttft_s(self) -> float | None:
        return self.at_s[0] - self.sent_s if self.at_s else None

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two pieces of the text."""
        return max((later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0)


def ask(
    url: str,
    messages: Sequence[Message],
    *,
    on_text: Callable[[Streamed], None] | None = None,
    limit_s: float = REQUEST_LIMIT_S,
    **settings: Any,
) -> Streamed:
    """Stream one chat. Whatever goes wrong becomes the answer's error."""
    body = {"model": MODEL, "messages": list(messages), "temperature": 0, "stream": True, **settings}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = Streamed(sent_s=time.perf_counter())
    deadline = time.monotonic() + limit_s
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as lines:
            for line in lines:
                if time.monotonic() > deadline:
                    answer.error = f"no end within {limit_s:g} s"
                    return answer
                if not line.startswith(b"data:"):
                    if line.strip() and not line.startswith((b"event:", b":")):
                        answer.error = line.decode(errors="replace").strip()
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return answer
                _read(answer, json.loads(data))
                if on_text is not None:
                    on_text(answer)
    except urllib.error.HTTPError as problem:
        answer.error = f"{problem.code}: {problem.read().decode(errors='replace')[:300]}"
        return answer
    except (OSError, ValueError) as problem:
        answer.error = f"{type(problem).__name__}: {problem}"
        return answer
    answer.error = answer.error or "the stream broke off"
    return answer


def _read(answer: Streamed, event: dict[str, Any]) -> None:
    if event.get("error"):
        answer.error = json.dumps(event["error"])
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        text = (choice.get("delta") or {}).get("content")
        if text:
            answer.text += text
            answer.at_s.append(time.perf_counter())
