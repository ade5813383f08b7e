"""Clients that leave, an engine that dies, and the end of the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tests.server.conftest import TINY
from tests.server.running import RunningServer, wait_until

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 480, "temperature": 1.0, "seed": 1, "n": 8}
PAST_THE_END = {"ignore_eos": True}


@pytest.fixture
def server(tiny_model_path: Path) -> Iterator[RunningServer]:
    """One of its own, since these tests end it."""
    # The reference backend takes its time to draw from 49,152 tokens in eight continuations.
    settings = ("--served-model-name", "tiny", "--admin-key", "secret", "--drain-limit", "120")
    running = RunningServer(tiny_model_path, *TINY, *settings)
    try:
        yield running.wait()
    finally:
        running.stop()


def in_engine(server: RunningServer) -> int:
    """Requests that run or wait there."""
    figures = server.http().get("/metrics").text
    return sum(
        int(float(line.split()[-1]))
        for line in figures.splitlines()
        if line.startswith(("outrider:num_requests_running", "outrider:num_requests_waiting"))
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(tiny: RunningServer, stream: bool) -> None:
    body = LONG | PAST_THE_END | {"stream": stream}
    with tiny.http() as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # dropping it would close the stream
                next(lines)
                wait_until(lambda: in_engine(tiny) == 8)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.4))
    wait_until(lambda: in_engine(tiny) == 0)


def test_an_engine_that_is_killed_is_replaced_and_everybody_is_told(server: RunningServer) -> None:
    client, engine = server.openai(), server.engine_pid
    stream = client.completions.create(**LONG, stream=True, extra_body=PAST_THE_END)
    next(stream)
    whole: list[Exception] = []

    def ask() -> None:
        try:
            client.completions.create(**LONG, extra_body=PAST_THE_END)
        except openai.APIError as error:
            whole.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: in_engine(server) == 16)
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="being restarted"):
        list(stream)
    thread.join(60)
    assert isinstance(whole[0], openai.InternalServerError)
    assert whole[0].status_code == 503
    assert server.http().get("/health").status_code == 200
    wait_until(lambda: server.http().get("/ready").status_code == 200)
    assert server.engine_pid != engine
    assert client.completions.create(model="tiny", prompt="Hi", max_tokens=3).usage.completion_tokens == 3


def test_a_text_process_that_was_killed_is_replaced_without_an_error(server: RunningServer) -> None:
    texts = server.children()["text_process"]
    for process in texts:
        os.kill(process, signal.SIGKILL)
    client = server.openai()
    for _ in texts:
        assert client.completions.create(model="tiny", prompt="Hi", max_tokens=3).usage.completion_tokens == 3
    assert not set(texts) & set(server.children()["text_process"])


def test_a_drain_finishes_what_runs_and_takes_nothing_new(server: RunningServer) -> None:
    client = server.openai()
    stream = client.completions.create(**LONG, stream=True, extra_body=PAST_THE_END)
    first = next(stream)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.http().get("/ready").status_code == 503)
    with pytest.raises(openai.InternalServerError, match="draining") as caught:
        client.completions.create(model="tiny", prompt="Hi")
    assert caught.value.response.headers["Retry-After"]
    assert [first, *stream][-1].choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
    assert server.children() == {}


def test_a_signal_after_a_drain_over_http_still_lets_requests_finish(server: RunningServer) -> None:
    """As where a service manager asks for a drain before it sends its signal."""
    stream = server.openai().completions.create(**LONG, stream=True, extra_body=PAST_THE_END)
    first = next(stream)
    drain = server.http("secret").post("/admin/drain")
    assert (drain.status_code, drain.json()["open_requests"]) == (202, 1)
    server.process.send_signal(signal.SIGTERM)
    assert [first, *stream][-1].choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0


def test_a_second_signal_ends_what_runs_and_says_so(server: RunningServer) -> None:
    stream = server.openai().completions.create(**LONG, stream=True, extra_body=PAST_THE_END)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.http().get("/ready").status_code == 503)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="the server is shutting down"):
        list(stream)
    assert server.process.wait(60) == 0
    assert server.children() == {}
    assert "Traceback" not in server.log


def test_an_idle_server_says_that_it_ends_and_lets_its_watchers_go(server: RunningServer) -> None:
    with server.http().stream("GET", "/kv/stream", params={"interval_ms": 60_000}) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        # To its proper end: one that is broken off raises.
        assert not [line for line in lines if line]
    assert server.process.wait(60) == 0
    assert "no request is open; shutting down" in server.log
    assert "Traceback" not in server.log


def test_a_server_between_two_attempts_to_start_its_engine_can_be_ended(server: RunningServer) -> None:
    for deaths in (1, 2):
        # The first is replaced at once; after the second, which never was ready, there is a pause.
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda deaths=deaths: server.log.count("the engine process has ended") == deaths)  # type: ignore[misc]
        wait_until(lambda deaths=deaths: deaths == 2 or "engine_process" in server.children())  # type: ignore[misc]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert server.children() == {}


def test_processes_end_with_the_front_end(server: RunningServer) -> None:
    others = [pid for pids in server.children().values() for pid in pids]
    assert len(others) == 2
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))


def run_outrider(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("outrider")
    return subprocess.run([script, *map(str, arguments)], capture_output=True, text=True, timeout=240)


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_outrider("serve", "no-such-model", "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "--port 0" in done.stderr


def test_a_model_that_cannot_be_loaded_ends_the_command_with_the_reason() -> None:
    done = run_outrider("serve", "no-such-model", "--port", 0)
    assert done.returncode == 2
    assert "error: model 'no-such-model' is not known" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--api-key", "@/nowhere/keys"), "cannot read the keys"),
        (("--api-key", "with space"), "without spaces"),
        (("--api-key", "same", "--admin-key", "same"), "use another"),
        (("--port", "70000"), "at most 65535"),
        (("--max-n", "0"), "n_max"),
        (("--port", "0", "--host", "no-such-host.invalid"), "--host takes an address of this machine"),
        (("--port", "0", "--host", "192.0.2.1"), "--host takes an address of this machine"),
        (("--port", "0", "--host", "x" * 99), "--host takes an address of this machine"),
        (("--render-limit", "0"), "render_limit_s"),
        (("--speculative-config", "{"), "not valid JSON"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(options: tuple[str, ...], words: str) -> None:
    done = run_outrider("serve", *options)
    assert done.returncode == 2
    assert words in done.stderr


def test_an_engine_that_hangs_is_replaced_and_everybody_is_told(tiny_model_path: Path) -> None:
    server = RunningServer(tiny_model_path, *TINY, "--served-model-name", "tiny", "--engine-timeout", "3").wait()
    try:
        client, engine = server.openai(), server.engine_pid
        stream = client.completions.create(**LONG, stream=True, extra_body=PAST_THE_END)
        next(stream)
        os.kill(engine, signal.SIGSTOP)
        http = server.http()
        # Nobody is told before the time has come: it may only be slow.
        assert http.get("/health").status_code == 200
        with pytest.raises(openai.APIError, match="no progress for 3 s"):
            list(stream)
        # It is killed at once; the next one needs a second at least before it can say anything.
        unhealthy = http.get("/health")
        assert unhealthy.status_code == 503
        assert "no progress" in unhealthy.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="being restarted"):
            client.completions.create(model="tiny", prompt="Hi", max_tokens=3)
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/health").status_code == 200
        assert server.engine_pid != engine
        assert not Path(f"/proc/{engine}").exists()
        assert client.completions.create(model="tiny", prompt="Hi", max_tokens=3).usage.completion_tokens == 3
        assert "after 3 s without progress" in server.log
    finally:
        assert server.stop() == 0
