"""Proxies of other projects in front of our workers.

vLLM's toy proxy and llm-d's sidecar are represented by drivers that send the same messages; vllm-router itself is run
where it is installed (scripts/test-proxies installs it and runs this file).
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.proxy.cluster import (
    CHAT,
    COMPLETIONS,
    LIMIT_S,
    STORY,
    alone,
    bodies,
    counters,
    joined,
    start_worker,
    texts_of,
)
from tests.proxy.conftest import Pair
from tests.requirements import missing
from tests.server.running import RunningServer, wait_until

Body = dict[str, Any]
Ask = Callable[[str, Body], httpx.Response]
WANTS_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ROUTER = os.environ.get("OUTRIDER_VLLM_ROUTER", "")
NO_ROUTER = "vllm-router is not installed; scripts/test-proxies installs it and runs these tests"


def post(url: str, path: str, body: Body, **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=LIMIT_S)


# ---- the messages of vLLM's toy proxy --------------------------------------------------------------


def toy_proxy(pair: Pair) -> Ask:
    """One token from the prefill worker, without what it would refuse; then the client's request with its answer."""

    def ask(path: str, body: Body) -> httpx.Response:
        # Without OPENAI_API_KEY in its environment it sends this.
        headers = {"Authorization": "Bearer None", "X-Request-Id": "4f1f7a52-6a5c-4f0e-9a0b-0f7b9d5cf1aa"}
        left_out = ("stream_options", "min_tokens", "min_completion_tokens")
        first = {name: value for name, value in body.items() if name not in left_out}
        first |= {"kv_transfer_params": WANTS_KV, "stream": False, "max_tokens": 1}
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        answer = post(pair.prefill.url, path, first, **headers)
        answer.raise_for_status()
        handed = answer.json().get("kv_transfer_params") or {}
        rest = body | {"kv_transfer_params": handed} if handed else body
        return post(pair.decode.url, path, rest, **headers)

    return ask


# ---- the messages of llm-d's routing sidecar -------------------------------------------------------


class Sidecar:
    """What stands beside each decode worker: the scheduler names the prefill worker in a header."""

    def __init__(self, decode: RunningServer) -> None:
        self._decode = decode

    def handle(self, path: str, body: Body, headers: dict[str, str]) -> httpx.Response:
        chosen = headers.pop("x-prefiller-host-port", None)
        if chosen is None:
            return post(self._decode.url, path, body, **headers)
        headers["x-request-id"] = "0b1c8b7e-c4a5-11f0-8de9-0242ac120002"
        first = {name: value for name, value in body.items() if name != "stream_options"}
        # The same fields on every route.
        first |= {"kv_transfer_params": WANTS_KV, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
        first["min_tokens"] = 1
        answer = post(f"http://{chosen}", path, first, **headers)
        if not answer.is_success:
            return answer
        # Null where the prefill worker said nothing.
        handed = answer.json().get("kv_transfer_params")
        return post(self._decode.url, path, body | {"kv_transfer_params": handed}, **headers)


def sidecar(pair: Pair) -> Ask:
    beside = Sidecar(pair.decode)
    host_and_port = pair.prefill.url.removeprefix("http://")
    return lambda path, body: beside.handle(path, body, {"x-prefiller-host-port": host_and_port})


@pytest.mark.parametrize("messages", [toy_proxy, sidecar])
def test_the_messages_of_other_proxies_give_a_single_workers_answer(
    messages: Callable[[Pair], Ask], pair: Pair
) -> None:
    ask = messages(pair)
    for path, body in bodies(messages.__name__):
        before = counters(pair.decode)
        answer = ask(path, body)
        assert answer.status_code == 200, answer.text
        assert texts_of(answer.json()) == alone(pair.decode, path, body), body
        after = counters(pair.decode)
        assert after["fetches"] - before["fetches"] == 1, body
        assert after["fetch_failures"] == before["fetch_failures"]
    body = {"prompt": f"{messages.__name__}, streamed: {STORY}", "temperature": 0, "max_tokens": 12}
    streamed = ask(COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}})
    text, events = joined(streamed.text.splitlines())
    assert text == alone(pair.decode, COMPLETIONS, body)[0][0]
    assert events[-1]["usage"]["prompt_tokens_details"]["transferred_tokens"] > 0
    wait_until(lambda: httpx.get(f"{pair.prefill.url}/kv_transfer").json()["leases"] == 0)


def test_a_sidecar_that_is_given_no_prefill_worker_leaves_the_prompt_to_its_own(pair: Pair) -> None:
    body = {"prompt": f"no prefill worker: {STORY}", "temperature": 0, "max_tokens": 9}
    answer = Sidecar(pair.decode).handle(COMPLETIONS, body, {})
    assert texts_of(answer.json()) == alone(pair.decode, COMPLETIONS, body)


def test_null_instead_of_what_the_prefill_worker_said_is_a_plain_request(pair: Pair) -> None:
    body = {"prompt": f"null: {STORY}", "temperature": 0, "max_tokens": 9}
    answer = post(pair.decode.url, COMPLETIONS, body | {"kv_transfer_params": None})
    assert texts_of(answer.json()) == alone(pair.decode, COMPLETIONS, body)


# ---- vllm-router, run for real ---------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Router:
    def __init__(self, prefill: list[RunningServer], decode: list[RunningServer], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        workers = [part for worker in prefill for part in ("--prefill", worker.url)]
        workers += [part for worker in decode for part in ("--decode", worker.url)]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
                + ["--vllm-pd-disaggregation", "--policy", "round_robin", "--worker-startup-check-interval", "1"]
                + workers,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_until(self.serves)

    def serves(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture(scope="module")
def installed_router() -> None:
    if not ROUTER:
        missing("vllm-router", NO_ROUTER)


@pytest.fixture(scope="module")
def router(installed_router: None, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    running = Router([pair.prefill], [pair.decode], tmp_path_factory.mktemp("router") / "log")
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.usefixtures("installed_router")
def test_vllm_router_gives_a_single_workers_answer(router: Router, pair: Pair) -> None:
    for path, body in bodies("router"):
        before = counters(pair.decode)
        answer = post(router.url, path, {"model": "tiny", **body})
        assert answer.status_code == 200, (answer.text, body)
        assert texts_of(answer.json()) == alone(pair.decode, path, body), body
        after = counters(pair.decode)
        assert after["fetches"] - before["fetches"] == 1, body
        assert after["fetch_failures"] == before["fetch_failures"]


@pytest.mark.usefixtures("installed_router")
def test_vllm_router_streams(router: Router, pair: Pair) -> None:
    body = {"model": "tiny", "prompt": f"router, streamed: {STORY}", "temperature": 0, "max_tokens": 12}
    streamed = post(router.url, COMPLETIONS, body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert joined(streamed.text.splitlines())[0] == alone(pair.decode, COMPLETIONS, body)[0][0]


@pytest.mark.usefixtures("installed_router")
def test_vllm_router_passes_our_refusals_on(router: Router) -> None:
    answer = post(router.url, CHAT, {"model": "other", "messages": [{"role": "user", "content": "x"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.usefixtures("installed_router")
def test_vllm_router_without_a_prefill_worker(
    pair: Pair, tiny_model_path: Path, key_file: Path, tmp_path: Path
) -> None:
    """It does not replace a prefill worker that dies, but it never answers with another text either."""
    dying = start_worker(tiny_model_path, key_file, "kv_producer").wait()
    router = Router([dying], [pair.decode], tmp_path / "log")
    try:
        body = {"model": "tiny", "prompt": f"dying: {STORY}", "temperature": 0, "max_tokens": 9}
        assert texts_of(post(router.url, COMPLETIONS, body).json()) == alone(pair.decode, COMPLETIONS, body)
        assert dying.stop() == 0
        body["prompt"] = f"dead: {STORY}"
        began_s = time.monotonic()
        answer = post(router.url, COMPLETIONS, body)
        print(f"vllm-router answers {answer.status_code} after {time.monotonic() - began_s:.1f} s: {answer.text[:300]}")
        assert answer.status_code >= 500 or texts_of(answer.json()) == alone(pair.decode, COMPLETIONS, body)
    finally:
        router.stop()
        dying.stop()
