"""A short load on a tiny model: what the script does for minutes on the real one."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import TINY
from tests.server.running import RunningServer, wait_until

from outrider.tools.bench.load import (
    ADMIN_KEY,
    ClientRecord,
    Footprint,
    LoadConfig,
    free_megabytes,
    growth_of,
    problems_left,
    run_load,
    send_requests,
    unexpected_ends,
)


def test_nothing_is_left_behind_by_clients_that_come_err_and_leave(tiny_model_path: Path) -> None:
    server = RunningServer(tiny_model_path, *TINY, "--admin-key", ADMIN_KEY, "--max-num-seqs", "12").wait()
    try:
        report = run_load(server, LoadConfig(clients=8, minutes=0.15, kills=1, max_tokens=24))
    finally:
        assert server.stop() == 0
    assert report["problems"] == []
    assert report["kills"] == 1
    assert report["left_early"] > 0
    assert any(kind.startswith("malformed 4") for kind in report["statuses"])
    assert report["statuses"]["stream 200"] > 8


# ---- every check has its fault ---------------------------------------------------------------------


def test_an_engine_that_ends_without_being_killed_is_a_problem() -> None:
    assert unexpected_ends(2, 2) == []
    (problem,) = unexpected_ends(3, 2)
    assert "ended 3 times, but was killed 2 times" in problem


CLEAN = {"arenas": [{"runs": "1k9f", "pages": 10}]}
SMALL = {1: Footprint(3.0, 0), 2: Footprint(-1.0, 1)}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, None),
        ({"pages": {"arenas": [{"runs": "1k1h8f", "pages": 10}]}}, "pages are not free"),
        ({"violations": 2.0}, "the sanitizer reported 2"),
        ({"log": "I1 broken at step 21: a write"}, "the sanitizer reported"),
        ({"log": "x\nTraceback (most recent call last)"}, "traceback"),
        ({"growth": {7: Footprint(65.0, 0)}}, "process 7 has grown by 65 MB"),
        ({"growth": {7: Footprint(0.0, 9)}}, "9 files"),
        ({"growth": {}}, "no process"),
    ],
)
def test_whatever_is_left_behind_is_a_problem(found: dict[str, Any], words: str | None) -> None:
    clean = {"pages": CLEAN, "violations": 0.0, "log": "all is well", "growth": SMALL}
    problems = problems_left(**{**clean, **found})
    assert [words is not None and words in problem for problem in problems] == ([] if words is None else [True])


def test_only_processes_that_were_there_before_have_grown() -> None:
    before, after = {1: Footprint(10.0, 4)}, {1: Footprint(12.0, 5), 2: Footprint(99.0, 50)}
    assert growth_of(before, after) == {1: Footprint(2.0, 1)}


def test_pages_that_are_free_are_going_to_take_memory() -> None:
    arenas = [{"runs": "1k12h3f4c40f", "page_bytes": 1 << 20}, {"runs": "1k2f", "page_bytes": 1 << 19}]
    assert free_megabytes({"arenas": arenas}) == 44


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, b"{}", "answered with 500"),
        (200, b"data: {}\n\n" + DONE, "malformed answered with 200"),
        (400, b"", "an answer broke off"),
        (200, b"data: {}\n\n", "stopped without its final event"),
        (200, b'data: {"error": {"code": "engine_error"}}\n\n' + DONE, "ended with an error"),
    ],
)
def test_whatever_a_client_should_not_meet_is_a_problem(status: int, body: bytes, words: str) -> None:
    class Wrong(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            # One byte more than will come, where an answer is to be broken off.
            self.send_header("Content-Length", str(len(body) + (not body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    record, stop = ClientRecord(), threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Wrong) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        client = threading.Thread(target=send_requests, args=(url, LoadConfig(), 0, record, stop), daemon=True)
        client.start()
        wait_until(lambda: any(words in problem for problem in record.problems))
        stop.set()
        client.join(60)
        server.shutdown()
