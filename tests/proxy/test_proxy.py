"""A proxy's own routes, limits and end, and how it divides the work."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.proxy.fakes import Exchange, FakeWorker, decode, hang, prefill, running, until
from tests.requirements import missing

from outrider.errors import ConfigError
from outrider.proxy.config import ProxyConfig
from outrider.proxy.run import serve_proxy
from outrider.proxy.workers import State, Worker

EVENT = 'data: {"n":1}\n\n'


async def endless(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(EVENT)
    await exchange.hang()


def test_the_least_busy_workers_are_asked() -> None:
    async def scenario() -> None:
        prefill_workers = [FakeWorker(prefill) for _ in range(2)]
        decode_workers = [FakeWorker(endless) for _ in range(3)]
        async with running(prefill_workers, decode_workers) as proxy:
            fields = {"prompt": "x", "stream": True}
            streams = [proxy.client.stream("POST", "/v1/completions", json=fields) for _ in range(6)]
            for stream in streams:
                await stream.__aenter__()
            assert [len(worker.requests) for worker in decode_workers] == [2, 2, 2]
            assert [len(worker.requests) for worker in prefill_workers] == [3, 3]
            assert await proxy.metric("worker_requests", role="decode") == 6
            for stream in streams:
                await stream.__aexit__(None, None, None)
            await until(lambda: all(worker.num_requests == 0 for worker in proxy.proxy.workers.all))

    asyncio.run(scenario())


def test_its_own_routes() -> None:
    async def scenario() -> None:
        async with running([FakeWorker(prefill)], [FakeWorker(decode)]) as proxy:
            assert (await proxy.client.get("/health")).json() == {"status": "ok"}
            ready = (await proxy.client.get("/ready")).json()
            assert ready == {"status": "ready", "prefill_workers": 1, "decode_workers": 1}
            await proxy.complete()
            assert await proxy.metric("http_requests_total", handler="/v1/completions", status="200") == 1
            assert await proxy.metric("worker_ready") == 2
            for path in ("/admin/drain", "/%61dmin/drain"):
                assert (await proxy.client.post(path)).status_code == 404

    asyncio.run(scenario())


def test_limits() -> None:
    async def scenario() -> None:
        d = FakeWorker(hang)
        async with running([FakeWorker(prefill)], [d], body_bytes_max=100, requests_max=1, request_limit_s=1) as proxy:
            assert (await proxy.complete(prompt="x" * 200)).status_code == 413
            waiting = asyncio.create_task(proxy.complete())
            await until(lambda: len(d.requests) == 1)
            refused = await proxy.complete()
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            late = await waiting
            assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
            assert d.requests[0].closed.is_set() or await d.requests[0].closed.wait()
            assert len(d.requests) == 1

    asyncio.run(scenario())


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    async def scenario() -> str:
        async with running([FakeWorker(prefill)], [FakeWorker(endless)], request_limit_s=0.3) as proxy:
            return (await proxy.complete(stream=True)).text

    first, error, done, rest = asyncio.run(scenario()).split("\n\n")
    assert (first + "\n\n", done, rest) == (EVENT, "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"


def test_an_answer_that_is_too_large_is_not_kept() -> None:
    async def much(exchange: Exchange) -> None:
        await exchange.answer("x" * 5000)

    async def scenario() -> httpx.Response:
        async with running([FakeWorker(prefill)], [FakeWorker(much)], answer_bytes_max=1000) as proxy:
            return await proxy.complete()

    assert asyncio.run(scenario()).status_code == 503


def test_a_web_page_of_another_name_is_refused() -> None:
    async def scenario() -> tuple[int, int]:
        async with running([FakeWorker(prefill)], [FakeWorker(decode)], allowed_hosts=("ours.example",)) as proxy:
            answers = [
                await proxy.client.get("/v1/models", headers={"Host": name})
                for name in ("evil.example", "ours.example")
            ]
            return answers[0].status_code, answers[1].status_code

    assert asyncio.run(scenario()) == (403, 200)


@pytest.mark.parametrize(
    ("states", "state", "why"),
    [
        ({"/kv_transfer": (200, '{"role":"kv_producer","x":1}')}, State.NOT_READY, "--prefill"),
        ({"/kv_transfer": (200, '{"role":"kv_both"}')}, State.READY, ""),
        ({"/kv_transfer": (404, '{"error":{"code":"kv_transfer_not_configured"}}')}, State.NOT_READY, "--cluster-key"),
        ({"/kv_transfer": (200, "[" * 5000)}, State.READY, ""),
        ({"/kv_transfer": (200, '{"role":' + "[" * 5000)}, State.READY, ""),
        ({"/ready": (503, "{}")}, State.NOT_READY, "503"),
        ({"/ready": (401, "{}"), "/kv_transfer": (401, "{}")}, State.READY, ""),
        ({"/ready": (404, "{}")}, State.READY, ""),
        ({"/ready": (404, "{}"), "/health": (500, "{}")}, State.NOT_READY, "500"),
    ],
)
def test_what_a_worker_says_of_itself(states: dict[str, Any], state: State, why: str) -> None:
    async def scenario() -> None:
        d = FakeWorker(decode)
        d.states = states
        async with running([FakeWorker(prefill)], [d]) as proxy:
            worker = proxy.proxy.workers.decode[0]
            assert worker.state is state
            assert why in worker.why
            assert worker.needs_key == (states.get("/ready") == (401, "{}"))
            assert (await proxy.complete()).status_code == (200 if state is State.READY else 503)

    asyncio.run(scenario())


def test_a_drain_lets_streams_finish_and_takes_no_more() -> None:
    async def scenario() -> tuple[str, int, int]:
        go_on = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.send(EVENT)
            await go_on.wait()
            await exchange.send("data: [DONE]\n\n")
            await exchange.end_stream()

        d = FakeWorker(waits)
        async with running([FakeWorker(prefill)], [d]) as proxy:
            reading = asyncio.create_task(proxy.complete(stream=True))
            await until(lambda: len(d.requests) == 1)
            proxy.drain.begin()
            await until(proxy.proxy.drain_began.is_set)
            statuses = (await proxy.complete()).status_code, (await proxy.client.get("/ready")).status_code
            go_on.set()
            text = (await reading).text
            await asyncio.wait_for(proxy.serving, 10)
            return text, *statuses

    assert asyncio.run(scenario()) == (EVENT + "data: [DONE]\n\n", 503, 503)


def test_a_drain_that_lasts_too_long_ends_streams_with_an_error() -> None:
    async def scenario() -> str:
        d = FakeWorker(endless)
        async with running([FakeWorker(prefill)], [d], drain_limit_s=0.2) as proxy:
            reading = asyncio.create_task(proxy.complete(stream=True))
            await until(lambda: len(d.requests) == 1)
            proxy.drain.begin()
            return (await reading).text

    assert "the server is shutting down" in asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefill": ()}, "at least one prefill worker"),
        ({"decode": ("localhost:8000",)}, "takes the URL of a worker"),
        ({"decode": ("http://:8000",)}, "takes the URL of a worker"),
        ({"decode": ("http://d:99999",)}, "takes the URL of a worker"),
        ({"decode": ("http://d:8000/v1",)}, "without anything after the port"),
        ({"decode": ("http://d", "http://d/")}, "the same worker twice"),
        ({"decode": ("http://d", "HTTP://D:80")}, "the same worker twice"),
        ({"decode": ("http://p",)}, "as a prefill and as a decode worker"),
        ({"decode": ("http://P:80/",)}, "as a prefill and as a decode worker"),
        ({"port": 70000}, "at most 65535"),
        ({"requests_max": 0}, "requests_max"),
        ({"request_limit_s": 0}, "above 0"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ProxyConfig(**{"prefill": ("http://p",), "decode": ("http://d",)} | settings)


BAD_URLS = [
    *["", "d:8000", "//d:8000", "http:d", "http://", "http:///", "http://:80", "http://d:0", "http://d:-1"],
    *[
        "http://d:+1",
        "http://d:80000",
        "http://d:\uff18\uff10",
        "http://d:8 ",
        " http://d",
        "http://d d",
        "http://d\x00",
    ],
    *["http://d\n:8000", "http://\u00e4", "http://a..b", "http://%64", "http://d,http://e", "http://d;x"],
    *[
        "http://" + "a" * 64,
        "http://" + "a." * 127 + "a",
        "http://::1:80",
        "http://[::1",
        "http://[v1.x]",
        "http://[d]",
    ],
    *["http://d/v1", "http://d//", "http://d?", "http://d?x", "http://d#", "http://d\\x", "ftp://d", "unix:///d"],
    *[None, 5, b"http://d", ["http://d"]],
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_workers_url_is_a_scheme_a_host_and_a_port(url: Any) -> None:
    with pytest.raises(ConfigError, match="--prefill takes the URL of a worker"):
        ProxyConfig(prefill=(url,), decode=("http://d",))


@pytest.mark.parametrize("url", ["http://d.example.:1/", "HTTPS://D", "http://[fe80::1%25eth0]:80", "http://1.2.3.4"])
def test_urls_of_workers_may_be_written_in_all_usual_ways(url: str) -> None:
    assert ProxyConfig(prefill=(url,), decode=("http://other",)).prefill == (url,)


@pytest.mark.parametrize("url", ["http://me:SECRET@d:8000", "http://SECRET@d", "ftp://@SECRET", "http://:SECRET@d/v1"])
def test_passwords_in_urls_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="without a user name or password") as caught:
        ProxyConfig(prefill=(url,), decode=("http://d",))
    assert "SECRET" not in str(caught.value)


def test_workers_behind_tls_are_reached_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        missing("openssl", "openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    secure = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secure.load_cert_chain(certificate, key)

    async def scenario() -> tuple[int, str, str]:
        d = FakeWorker(decode)
        await d.start(secure)
        async with running([FakeWorker(prefill)], [d]) as proxy:
            worker = proxy.proxy.workers.decode[0]
            return (await proxy.complete()).status_code, worker.state.name, worker.why

    status, state, why = asyncio.run(scenario())
    assert (status, state) == (503, "LOST")
    assert "certificate" in why.lower(), "an unknown certificate was accepted"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert asyncio.run(scenario())[:2] == (200, "READY")


def test_a_proxy_that_cannot_watch_its_workers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    async def look(worker: Worker, config: ProxyConfig) -> None:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Worker, "look", look)
    config = ProxyConfig(prefill=("http://127.0.0.1:1",), decode=("http://127.0.0.1:2",), port=0)
    with pytest.raises(ExceptionGroup):
        serve_proxy(config, lambda url, workers: None)
