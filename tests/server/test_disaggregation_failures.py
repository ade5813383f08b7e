"""Workers that die, clients that leave and servers that end in the middle of a hand-off: every request gets the right
text or an error, and all KV is given back."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.server.conftest import API_KEY, TINY
from tests.server.running import RunningServer, wait_until
from tests.server.workers import ASKED, CLUSTER_KEY, ask, counters, metrics, refusal, start_worker, state, ticket_of

ROUTE = "/v1/completions"


class Workers(NamedTuple):
    prefill: RunningServer
    decode: RunningServer
    strict: RunningServer
    """A decode worker under the policy fail, with room for one request at a time."""


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "key"
    path.write_text(CLUSTER_KEY)
    return path


@pytest.fixture(scope="module")
def workers(tiny_model_path: Path, key_file: Path) -> Iterator[Workers]:
    quick: dict[str, Any] = {"answer_limit_s": 1.5}
    strict = quick | {"kv_load_failure_policy": "fail"}
    started = Workers(
        start_worker(tiny_model_path, key_file, "kv_producer", lease_s=8.0),
        start_worker(tiny_model_path, key_file, "kv_consumer", **quick),
        start_worker(tiny_model_path, key_file, "kv_consumer", "--max-num-seqs", "1", **strict),
    )
    try:
        for server in started:
            server.wait()
        yield started
        for server in started:
            assert "broken at step" not in server.log, server.log
            assert "Traceback" not in server.log, server.log
    finally:
        for server in started:
            assert server.stop() == 0, server.log


def text(name: str, **more: Any) -> dict[str, Any]:
    prompt = f"{name}: the quick brown fox jumps over the lazy dog, and the dog dreams of a slow red fox. " * 3
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12, **more}


def running(worker: RunningServer) -> float:
    found = metrics(worker)
    return found["num_requests_running"] + found["num_requests_waiting"]


def kill_engine(worker: RunningServer) -> None:
    os.kill(worker.engine_pid, signal.SIGKILL)
    wait_until(lambda: worker.http(API_KEY).get("/ready").status_code == 503)


def wait_ready(worker: RunningServer) -> None:
    wait_until(lambda: worker.http(API_KEY).get("/ready").status_code == 200)


@contextmanager
def stream(worker: RunningServer, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of an answer that has begun."""
    with worker.http(API_KEY).stream("POST", ROUTE, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        yield (json.loads(line) for line in lines if line != "[DONE]")


@contextmanager
def occupied(worker: RunningServer, name: str) -> Iterator[None]:
    """Let a worker be busy with a long request, which takes its only place: a token at a time, each drawn from all."""
    slow = {"max_tokens": 420, "ignore_eos": True, "speculate": False, "temperature": 1.0, "logprobs": 20}
    long = text(name, **slow, kv_transfer_params={"do_remote_prefill": True, "ticket": None})
    with stream(worker, long) as events:
        next(events)
        yield


def test_a_prefill_worker_that_died_before_it_was_asked(workers: Workers) -> None:
    wait_ready(workers.prefill)
    body = text("died")
    expected = ask(workers.prefill, ROUTE, body)["choices"]
    taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, ROUTE, body)}
    before = state(workers.prefill)
    recomputed = counters(workers.strict)["recomputed_prompts"]
    kill_engine(workers.prefill)
    for streams in (False, True):
        status, error = refusal(workers.strict, ROUTE, {**taken, "stream": streams})
        assert (status, error["code"]) == (503, "kv_transfer_failed")
        assert "does not answer" in error["message"]
        assert before["endpoint"] not in error["message"]
    assert counters(workers.strict)["recomputed_prompts"] == recomputed
    answer = ask(workers.decode, ROUTE, taken)
    assert answer["choices"] == expected
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "transferred_tokens": 0}
    assert metrics(workers.decode)["kv_transfer_fetch_failures_total"] >= 1
    wait_ready(workers.prefill)
    after = state(workers.prefill)
    assert after["engine_id"] != before["engine_id"]
    # The worker that replaced it is found by new tickets.
    body = text("died, then replaced")
    taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, ROUTE, body)}
    assert ask(workers.strict, ROUTE, taken)["usage"]["prompt_tokens_details"]["transferred_tokens"] > 20
    # What was handed over before counts on.
    assert metrics(workers.prefill)["kv_transfer_handed_over_total"] >= 2


def test_a_stream_that_has_begun_ends_with_an_error_if_the_kv_is_lost(workers: Workers) -> None:
    wait_ready(workers.prefill)
    body = text("lost later")
    with occupied(workers.strict, "busy before the loss"):
        taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, ROUTE, body)}
        with stream(workers.strict, taken) as events:
            # The first token comes with the offer, before there is a place for the request.
            assert next(events)["choices"][0]["text"]
            kill_engine(workers.prefill)
            *_, last = events
        assert last["error"]["code"] == "kv_transfer_failed"
    wait_until(lambda: running(workers.strict) == 0)


def test_a_client_that_leaves_while_its_request_waits_releases_the_kv(workers: Workers) -> None:
    wait_ready(workers.prefill)
    body, before = text("left"), counters(workers.prefill)
    with occupied(workers.strict, "busy while one leaves"):
        taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, ROUTE, body)}
        with stream(workers.strict, taken) as events:
            next(events)
            held = state(workers.prefill)
            assert held["leases"] == 1, held
        wait_until(lambda: state(workers.prefill)["held_pages"] == 0)
    assert counters(workers.prefill)["leases_expired"] == before["leases_expired"]
    wait_until(lambda: running(workers.strict) == 0)


@pytest.mark.parametrize("route", ["prefill", "decode"])
def test_a_client_that_leaves_at_once_leaves_nothing_behind(workers: Workers, route: str) -> None:
    wait_ready(workers.prefill)
    body = text(f"left at once: {route}", max_tokens=300, ignore_eos=True)
    params = ASKED if route == "prefill" else ticket_of(workers.prefill, ROUTE, body)
    worker = workers.prefill if route == "prefill" else workers.decode
    url = httpx.URL(worker.url)
    content = json.dumps({**body, "kv_transfer_params": params}).encode()
    for _ in range(3):
        with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
            head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
    wait_until(lambda: running(worker) == 0)
    wait_until(lambda: state(workers.prefill)["held_pages"] == 0)
    assert state(workers.prefill)["leases"] == 0


def test_kv_that_no_decode_worker_wants_is_given_back_by_an_idle_worker(workers: Workers) -> None:
    wait_ready(workers.prefill)
    before = metrics(workers.prefill)["kv_transfer_leases_expired_total"]
    ticket_of(workers.prefill, ROUTE, text("unwanted"))
    assert metrics(workers.prefill)["kv_transfer_held_pages"] > 0
    # Nothing but time passes for this worker; /metrics does not ask its engine.
    wait_until(lambda: metrics(workers.prefill)["kv_transfer_held_pages"] == 0)
    assert metrics(workers.prefill)["kv_transfer_leases_expired_total"] == before + 1


def test_a_full_prefill_worker_gives_no_ticket_and_waits_for_what_it_holds_when_it_ends(
    workers: Workers, tiny_model_path: Path, key_file: Path
) -> None:
    # A prompt takes some 5 of 2,000 pages.
    small = start_worker(tiny_model_path, key_file, "kv_producer", held_share=0.004, lease_s=50.0)
    try:
        small.wait()
        first, second = text("fits"), text("does not fit")
        taken = {**first, "kv_transfer_params": ticket_of(small, ROUTE, first)}
        refused = ask(small, ROUTE, {**second, "max_tokens": 1, "kv_transfer_params": ASKED})["kv_transfer_params"]
        assert refused["ticket"] is None
        assert counters(small)["hand_overs_refused"] == 1
        expected = ask(small, ROUTE, second)["choices"]
        for worker in (workers.decode, workers.strict):
            assert ask(worker, ROUTE, {**second, "kv_transfer_params": refused})["choices"] == expected
        small.process.send_signal(signal.SIGTERM)
        wait_until(lambda: small.http(API_KEY).get("/ready").status_code == 503)
        wait_until(lambda: "fetch the KV of 1 prompts" in small.log)
        with pytest.raises(Exception, match="timed out"):
            small.process.wait(1)
        answer = ask(workers.strict, ROUTE, taken)
        assert answer["usage"]["prompt_tokens_details"]["transferred_tokens"] > 20
        # Long before the lease would have ended.
        assert small.process.wait(20) == 0
    finally:
        small.stop()


def test_a_prefill_worker_ends_within_its_limit_all_the_same(tiny_model_path: Path, key_file: Path) -> None:
    worker = start_worker(tiny_model_path, key_file, "kv_both", "--drain-limit", "1", lease_s=60.0)
    try:
        worker.wait()
        ticket_of(worker, ROUTE, text("forgotten"))
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(20) == 0
        assert "the KV of 1 prompts was not fetched in time" in worker.log
    finally:
        worker.stop()


def test_without_nixl_the_server_ends_before_it_loads_the_model(
    tiny_model_path: Path, key_file: Path, tmp_path: Path
) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('not here', name={name!r})\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    server = RunningServer(
        tiny_model_path / "no such model",
        *(*TINY, "--kv-transfer-config", '{"kv_role": "kv_producer"}', "--cluster-key", f"@{key_file}"),
        environment={"PYTHONPATH": path},
    )
    assert server.process.wait(60) != 0
    wait_until(lambda: "pip install 'outrider[pd]'" in server.log)
    assert "no such model" not in server.log


def test_many_hand_offs_at_a_time_some_of_whose_clients_leave(workers: Workers) -> None:
    wait_ready(workers.prefill)

    def hand_off(number: int) -> bool | None:
        """Whether the text is that of the prefill worker alone; None if the client has left."""
        body = text(f"many {number}", max_tokens=10 + number % 7, temperature=0.8, seed=number)
        leaves_after_s = number % 5 * 0.02 if number % 3 == 0 else 60
        try:
            taken = {**body, "kv_transfer_params": ticket_of(workers.prefill, ROUTE, body)}
            answer = workers.decode.http(API_KEY).post(ROUTE, json=taken, timeout=leaves_after_s or None)
        except httpx.TimeoutException:
            return None
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["choices"] == ask(workers.prefill, ROUTE, body)["choices"])

    before = counters(workers.decode)
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(hand_off, range(40)))
    assert outcomes.count(True) >= 26
    assert False not in outcomes
    wait_until(lambda: running(workers.decode) == 0)
    wait_until(lambda: state(workers.prefill)["leases"] == state(workers.prefill)["held_pages"] == 0)
    now = counters(workers.decode)
    assert now["fetches"] - before["fetches"] >= 26
    assert now["fences"] == before["fences"]
