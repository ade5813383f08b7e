"""A prefill worker, decode workers and a single server over one tiny model, and what a proxy does with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.server.conftest import API_KEY, FIXED_DRAFTS, OTHER_KEY, TINY
from tests.server.running import RunningServer

CLUSTER_KEY = "a cluster key that must not be seen anywhere"
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
ASKED |= {"remote_host": None, "remote_port": None}
"""What proxies for vLLM send to a prefill worker."""


def start_worker(model: Path, key_file: Path, role: str, *options: object, **settings: Any) -> RunningServer:
    """Starts a worker as someone would who comes from vLLM."""
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu", "lease_s": 12.0}
    return RunningServer(
        model,
        *(*TINY, *FIXED_DRAFTS, "--sanitizer-level", "bytes", "--served-model-name", "tiny", "--drain-limit", "60"),
        *("--api-key", API_KEY, "--api-key", OTHER_KEY, "--log-interval", "0.5"),
        *("--kv-transfer-config", json.dumps(config | settings), "--cluster-key", f"@{key_file}"),
        *options,
    )


def prefill(
    worker: RunningServer, route: str, body: Mapping[str, Any], *, key: str = API_KEY, **more: Any
) -> dict[str, Any]:
    """Returns the prefill worker's answer to what vLLM's proxies make of a request. They pass on the rest."""
    sent = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": ASKED, **more}
    if "max_completion_tokens" in body:
        sent["max_completion_tokens"] = 1
    sent.pop("stream_options", None)
    answer = worker.http(key).post(route, json=sent)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ticket_of(worker: RunningServer, route: str, body: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    params: dict[str, Any] = prefill(worker, route, body, **more)["kv_transfer_params"]
    assert params["ticket"]
    return params


def ask(worker: RunningServer, route: str, body: Mapping[str, Any], *, key: str = API_KEY) -> dict[str, Any]:
    answer = worker.http(key).post(route, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refusal(worker: RunningServer, route: str, body: Mapping[str, Any], *, key: str = API_KEY) -> tuple[int, Any]:
    """Returns the status and the error of a request that fails before its first byte, streamed or not."""
    answer = worker.http(key).post(route, json=body)
    assert answer.status_code != 200, answer.text
    return answer.status_code, answer.json()["error"]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(worker: RunningServer, route: str, body: Mapping[str, Any], *, key: str = API_KEY) -> list[dict[str, Any]]:
    """Returns one dict for each choice, with its joined text, calls, token ids and the reason why it ended."""
    with worker.http(key).stream("POST", route, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        chunks = events(answer)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found = choices.setdefault(choice["index"], {"text": "", "calls": "", "tokens": [], "finish": None})
            delta = choice.get("delta", choice)
            found["text"] += delta.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                found["calls"] += call["function"].get("name", "") + call["function"]["arguments"]
            found["tokens"] += choice.get("token_ids") or []
            found["finish"] = choice["finish_reason"] or found["finish"]
    return [choices[index] for index in sorted(choices)]


def state(worker: RunningServer) -> dict[str, Any]:
    answer = worker.http(API_KEY).get("/kv_transfer")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counters(worker: RunningServer) -> dict[str, int]:
    found: dict[str, int] = state(worker)["counters"]
    return found


def metrics(worker: RunningServer) -> dict[str, float]:
    """Returns all samples whose labels do not matter, by their name without the prefix."""
    families = text_string_to_metric_families(worker.http(API_KEY).get("/metrics").text)
    return {sample.name.removeprefix("outrider:"): sample.value for family in families for sample in family.samples}
