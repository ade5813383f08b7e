"""What a server says to whoever started it, on a terminal and where nobody can read it."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
from tests.server.conftest import TINY
from tests.server.running import wait_until


def start(model: Path, port: int, stderr: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "outrider", "serve", str(model), "--port", str(port), *TINY]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)


def test_the_bar_is_gone_once_the_server_is_ready(tiny_model_path: Path) -> None:
    ours, theirs = pty.openpty()
    server = start(tiny_model_path, 0, theirs)
    os.close(theirs)
    said = b""
    try:
        while chunk := read(ours):
            if b"serving " not in said and b"serving " in said + chunk:
                server.send_signal(signal.SIGINT)
            said += chunk
        assert server.wait(60) == 0
    finally:
        server.kill()
        os.close(ours)
    before, _, after = said.partition(b"serving ")
    assert b"loading weights" in before
    assert b"loading" not in after
    assert b"shutting down" in after


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        # So Linux says that nobody has the other end any more.
        return b""


def test_a_log_that_cannot_be_written_stops_nobody(tiny_model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open("/dev/full", "wb") as full:
        server = start(tiny_model_path, port, full.fileno())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            wait_until(lambda: server.poll() is not None or is_ready(http))
            answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False
