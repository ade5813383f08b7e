"""Real workers over a tiny model with nixl between them, and `outrider proxy` as a process."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import httpx
from tests.requirements import require
from tests.server.conftest import FIXED_DRAFTS
from tests.server.running import RunningServer

from outrider.tools.bench.server_process import ServerProcess

WORKER = ("--backend", "reference", "--num-threads", "1", "--kv-cache-memory-bytes", "8M", "--sanitizer", "raise")
LIMIT_S = 120.0
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
STORY = "The quick brown fox jumps over the lazy dog, and the dog dreams of a slow red fox. "


def start_worker(model: Path, key_file: Path, role: str, **settings: Any) -> RunningServer:
    """A worker that is starting."""
    require("nixl", "nixl_cu12", "nixl_cu13")
    config = {"kv_connector": "nixl", "kv_role": role, "lease_s": 6, "answer_limit_s": 2, **settings}
    given = ("--served-model-name", "tiny", "--kv-transfer-config", json.dumps(config), "--cluster-key", f"@{key_file}")
    return RunningServer(model, *WORKER, *FIXED_DRAFTS, *given)


class RunningProxy(ServerProcess):
    def __init__(self, prefill: list[str], decode: list[str], *options: str) -> None:
        workers = [part for url in prefill for part in ("--prefill", url)]
        workers += [part for url in decode for part in ("--decode", url)]
        super().__init__([*workers, *options], command="proxy")

    def wait(self) -> RunningProxy:
        self.wait_ready()
        return self


def bodies(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds, for prompts of some pages that begin with this name."""
    text = f"{name}: {STORY * 3}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    message = {"messages": [{"role": "user", "content": text}]}
    return [
        (COMPLETIONS, {"prompt": text, "temperature": 0, "max_tokens": 12}),
        (COMPLETIONS, {"prompt": "2" + text, "temperature": 0.9, "seed": 4, "max_tokens": 12, "n": 2}),
        (COMPLETIONS, {"prompt": list(range(5, 90)), "temperature": 0, "max_tokens": 9, "min_tokens": 5}),
        (CHAT, {**message, "temperature": 0.8, "seed": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {**message, "temperature": 0, "max_completion_tokens": 9, "tools": [tool]}),
        (CHAT, {**message, "temperature": 0, "max_tokens": 9, "guided_regex": "[a-f]{4,9}"}),
        (CHAT, {**message, "temperature": 0, "max_tokens": 1}),
    ]


def texts_of(answer: Any) -> list[Any]:
    """What an answer says, without what differs from time to time."""
    if "output" in answer:
        return [part["text"] for item in answer["output"] for part in item["content"]]
    return [(choice.get("text", choice.get("message")), choice["finish_reason"]) for choice in answer["choices"]]


def alone(worker: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """What one worker says that computes everything itself: nothing of it is cached under this salt."""
    answer = httpx.post(worker.url + path, json=body | {"cache_salt": secrets.token_hex(4)}, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return texts_of(answer.json())


def counters(worker: RunningServer) -> dict[str, int]:
    found: dict[str, int] = httpx.get(worker.url + "/kv_transfer", timeout=LIMIT_S).json()["counters"]
    return found


def joined(lines: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream of completions, and its events."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return text, events
