"""Keys, tenants, admin routes, queue and body limits."""

from __future__ import annotations

import json
import re
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.server.conftest import ADMIN_KEY, API_KEY, OTHER_KEY, TINY
from tests.server.running import RunningServer, wait_until

PUBLIC = "/health"


@pytest.fixture(scope="module")
def guarded(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Keys from the command line's file and from the environment, small limits, vLLM's prefix."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"# tenants\n{OTHER_KEY}\n")
    server = RunningServer(
        tiny_model_path,
        *(*TINY, "--api-key", f"@{keys}", "--admin-key", ADMIN_KEY, "--metrics-prefix", "vllm:"),
        *("--max-num-seqs", "2", "--max-queue", "2", "--max-body-bytes", "20000", "--idle-limit", "2"),
        *("--max-prompt-tokens", "100", "--max-n", "3", "--log-interval", "0.5"),
        environment={"OUTRIDER_API_KEY": API_KEY},
    )
    try:
        yield server.wait()
    finally:
        assert server.stop() == 0, server.log


def routes(server: RunningServer) -> list[tuple[str, str]]:
    paths = server.http(API_KEY).get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_a_key_is_needed_on_every_route_but_health_and_the_page(guarded: RunningServer) -> None:
    known = routes(guarded)
    assert len(known) > 10
    for key in (None, "wrong", API_KEY[:-1], API_KEY + "x", ADMIN_KEY):
        http = guarded.http(key)
        for method, path in [
            *known,
            ("GET", "/openapi.json"),
            ("GET", "/page/x"),
            ("GET", "/nowhere"),
            ("GET", "//health"),
        ]:
            if path.startswith("/admin/"):
                continue
            # The whole address: joined to a base, two slashes would begin the name of a host.
            answer = http.request(method, guarded.url + path)
            expected = 200 if path == PUBLIC else 401
            assert answer.status_code == expected, (method, path, key)
            if expected == 401:
                assert answer.json()["error"]["code"] == "invalid_api_key"


def test_both_keys_and_a_browsers_password_open_the_door(guarded: RunningServer) -> None:
    for key in (API_KEY, OTHER_KEY):
        assert guarded.http(key).get("/v1/models").status_code == 200
    password = b64encode(f"me:{API_KEY}".encode()).decode()
    assert guarded.http().get("/v1/models", headers={"Authorization": f"Basic {password}"}).status_code == 200
    for bad in ("Basic", "Basic !!!", "Basic " + b64encode(b"\xff\xff").decode(), "Digest x", "Bearer"):
        assert guarded.http().get("/v1/models", headers={"Authorization": bad}).status_code == 401


def test_admin_routes_take_only_the_admin_key(guarded: RunningServer) -> None:
    for key in (None, API_KEY, "wrong"):
        assert guarded.http(key).post("/admin/reset_prefix_cache").status_code == 403
        assert guarded.http(key).post("/admin/drain").status_code == 403
    assert guarded.http(ADMIN_KEY).post("/admin/reset_prefix_cache").json() == {"status": "reset"}


def cached(server: RunningServer, key: str, prompt: str, **more: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **more}
    answer = server.http(key).post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_tenants_do_not_share_a_prefix_cache(guarded: RunningServer) -> None:
    """Whether a prompt is answered faster must not tell what others have asked."""
    prompt = "the secret of one tenant is safe from the others, whatever they guess and try " * 4
    assert cached(guarded, API_KEY, prompt) == 0
    assert cached(guarded, API_KEY, prompt) > 32
    assert cached(guarded, OTHER_KEY, prompt) == 0
    # A salt of one's own choice leads into nobody else's part.
    assert cached(guarded, API_KEY, prompt, cache_salt="a") == 0
    assert cached(guarded, OTHER_KEY, prompt, cache_salt="a") == 0
    assert guarded.http(ADMIN_KEY).post("/admin/reset_prefix_cache").status_code == 200
    assert cached(guarded, API_KEY, prompt) == 0


def test_a_body_that_is_too_large_is_refused_however_it_comes(guarded: RunningServer) -> None:
    http = guarded.http(API_KEY)
    answer = http.post("/v1/completions", json={"prompt": "x" * 30_000})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert answer.headers["Connection"] == "close", "the rest of the body is not read"

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    answer = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def connected(server: RunningServer) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=30)


def test_a_body_that_never_ends_is_left(guarded: RunningServer) -> None:
    with connected(guarded) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {API_KEY}\r\n"
            "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("path", ["/health", "/", "/page/app.js"])
def test_load_balancers_may_ask_for_the_head_alone(path: str, guarded: RunningServer) -> None:
    answer = guarded.http(None).head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
def test_headers_that_never_end_are_left(said: bytes, guarded: RunningServer) -> None:
    with connected(guarded) as connection:
        connection.sendall(said)
        assert connection.recv(100) == b""


def test_headers_that_never_end_are_left_behind_a_whole_request_too(guarded: RunningServer) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with connected(guarded) as connection:
        for _ in range(2):
            connection.sendall(whole)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(whole[:20])
        assert connection.recv(100) == b""


def test_a_full_queue_says_when_to_come_back(guarded: RunningServer) -> None:
    client = guarded.openai(API_KEY)
    options = {"model": client.models.list().data[0].id, "prompt": "Once", "max_tokens": 400, "temperature": 1.0}
    past_the_end = {"ignore_eos": True}
    streams = [client.completions.create(**options, stream=True, extra_body=past_the_end) for _ in range(2)]
    two = client.completions.create(**options, n=2, stream=True, extra_body=past_the_end)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**options)
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    for stream in (*streams, two):
        stream.close()
    wait_until(lambda: guarded.http(API_KEY).post("/v1/completions", json={"prompt": "x"}).status_code == 200)


def test_configured_limits_hold(guarded: RunningServer) -> None:
    http = guarded.http(API_KEY)
    too_long = http.post("/v1/completions", json={"prompt": [5] * 110}).json()["error"]
    assert "at most 100 tokens" in too_long["message"]
    assert "10 too many" in too_long["message"]
    assert http.post("/v1/completions", json={"prompt": "x", "n": 4}).json()["error"]["param"] == "n"


def test_metrics_carry_the_prefix_that_was_asked_for(guarded: RunningServer) -> None:
    text = guarded.http(API_KEY).get("/metrics").text
    for name in (
        *(
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
        ),
        *("prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("kv_cache_usage_perc", "num_preemptions_total"),
        *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
        *("num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_bucket"),
        *("inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    ):
        assert f"\nvllm:{name}{{engine=" in text, name
    assert "outrider:" not in text


def test_figures_are_logged_as_operators_know_them(guarded: RunningServer) -> None:
    seen = threading.Event()

    def ask() -> None:
        # One request may be over before the next line is due.
        with guarded.http(API_KEY) as http:
            while not seen.is_set():
                http.post("/v1/completions", json={"prompt": "a b a b a b", "max_tokens": 300, "ignore_eos": True})

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_until(lambda: "Avg generation throughput" in guarded.log and "Running: 1 reqs" in guarded.log)
    finally:
        seen.set()
        thread.join()


def test_pages_of_the_cache_can_be_watched(guarded: RunningServer) -> None:
    http = guarded.http(API_KEY)
    told = http.get("/kv").json()
    (arena,) = told["arenas"]
    assert arena["runs"].startswith("1k")
    assert sum(map(int, re.findall(r"\d+", arena["runs"]))) == arena["pages"]
    assert {group["name"] for group in told["groups"]} == {"target.full"}
    with http.stream("GET", "/kv/stream?interval_ms=100") as answer:
        lines = answer.iter_lines()
        events = [line for line, _ in zip((line for line in lines if line.startswith("data:")), range(3), strict=False)]
    assert len(events) == 3
    assert http.get("/kv/stream?interval_ms=1").status_code == 400


def test_watching_the_pages_tells_nothing_about_other_tenants_prompts(guarded: RunningServer) -> None:
    """Neither texts nor tokens, and of others not even how long their prompts are or what was found for them."""
    prompt = "what only one of them may know about zanzibar and its lighthouses " * 3
    for _ in range(2):
        cached(guarded, API_KEY, prompt)
    wait_until_told(guarded, prompt, prompt)
    mine, theirs = (guarded.http(key).get("/kv").json() for key in (API_KEY, OTHER_KEY))
    assert mine["recent_hits"][0]["cached_tokens"] > 32
    length = mine["recent_hits"][0]["prompt_tokens"]
    assert length not in [hit["prompt_tokens"] for hit in theirs["recent_hits"]]
    with guarded.http(OTHER_KEY).stream("GET", "/kv/stream?interval_ms=100") as answer:
        streamed = json.loads(next(line for line in answer.iter_lines() if line.startswith("data:"))[5:])
    assert length not in [hit["prompt_tokens"] for hit in streamed["recent_hits"]]
    # Requests of others do not even count: the next number is one's own.
    cached(guarded, OTHER_KEY, "x")
    wait_until(lambda: len(guarded.http(OTHER_KEY).get("/kv").json()["recent_hits"]) == len(theirs["recent_hits"]) + 1)
    after = guarded.http(OTHER_KEY).get("/kv").json()["recent_hits"]
    assert after[0]["number"] == len(after)
    # Whoever adds a field to what is told has to look here.
    assert set(mine) == {"step", "states", "arenas", "groups", "recent_hits"}
    assert {name for arena in mine["arenas"] for name in arena} == {"page_bytes", "pages", "runs"}
    assert {name for group in mine["groups"] for name in group} == {
        *("name", "arena", "kind", "page_tokens", "held", "published")
    }
    assert set(mine["recent_hits"][0]) == {"number", "age_s", "prompt_tokens", "cached_tokens"}


def test_a_hit_is_told_as_soon_as_its_request_has_begun(guarded: RunningServer) -> None:
    http, client = guarded.http(API_KEY), guarded.openai(API_KEY)
    prompt = "whoever was here last, and nobody else before them"
    cached(guarded, API_KEY, prompt)
    wait_until_told(guarded, prompt)
    last = http.get("/kv").json()["recent_hits"][0]["number"]
    options = {"model": client.models.list().data[0].id, "prompt": "Once", "max_tokens": 400, "temperature": 1.0}
    with client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        # The look at the pages may be as old as the shortest interval.
        wait_until(lambda: http.get("/kv").json()["recent_hits"][0]["number"] > last)
        told = http.get("/kv").json()
        assert told["recent_hits"][0]["number"] == last + 1
        assert told["groups"][0]["held"] > 0, "it has ended"
    assert [hit["number"] for hit in told["recent_hits"]] == list(
        range(last + 1, last + 1 - len(told["recent_hits"]), -1)
    )


def wait_until_told(server: RunningServer, *prompts: str) -> None:
    """A look at the pages may be as old as the shortest interval: until it shows these requests, the latest last."""
    http = server.http(API_KEY)
    lengths = [http.post("/tokenize", json={"prompt": prompt}).json()["count"] for prompt in prompts]

    def are_told() -> bool:
        hits = http.get("/kv").json()["recent_hits"]
        return [hit["prompt_tokens"] for hit in reversed(hits[: len(lengths)])] == lengths

    wait_until(are_told)
