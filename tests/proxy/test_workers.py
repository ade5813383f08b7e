"""`outrider proxy` in front of real workers: the text of one worker, whatever becomes of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.proxy.cluster import (
    COMPLETIONS,
    LIMIT_S,
    RESPONSES,
    STORY,
    RunningProxy,
    alone,
    bodies,
    counters,
    joined,
    start_worker,
    texts_of,
)
from tests.proxy.conftest import Pair
from tests.server.running import RunningServer, wait_until
from tests.stopping import stop

PREFILL_LIMIT_S = 4


@pytest.fixture(scope="module")
def proxy(pair: Pair) -> Iterator[RunningProxy]:
    started = RunningProxy([pair.prefill.url], [pair.decode.url])
    try:
        yield started.wait()
        assert "Traceback" not in started.log, started.log
    finally:
        assert started.stop() == 0, started.log


def test_every_kind_of_request_gets_a_single_workers_answer(pair: Pair, proxy: RunningProxy) -> None:
    assert "1 of 1 prefill worker ready · 1 of 1 decode worker ready" in proxy.log
    requests = [*bodies("kinds"), (RESPONSES, {"input": STORY * 3, "temperature": 0, "max_output_tokens": 9})]
    for path, body in requests:
        before = counters(pair.decode)
        answer = httpx.post(proxy.url + path, json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        assert texts_of(answer.json()) == alone(pair.decode, path, body), body
        after = counters(pair.decode)
        assert after["fetches"] == before["fetches"] + 1, body
        assert after["fetch_failures"] == before["fetch_failures"]
        # The same once more, as a stream, whose prompt is cached by now.
        with httpx.stream("POST", proxy.url + path, json=body | {"stream": True}, timeout=LIMIT_S) as stream:
            lines = list(stream.iter_lines())
        if path == COMPLETIONS and "n" not in body:
            assert joined(lines)[0] == texts_of(answer.json())[0][0]
    assert counters(pair.decode)["transferred_tokens"] > 100
    assert counters(pair.decode)["draft_groups_missing"] == 0
    wait_until(lambda: httpx.get(f"{pair.prefill.url}/kv_transfer").json()["leases"] == 0)


def test_other_routes(pair: Pair, proxy: RunningProxy) -> None:
    models = httpx.get(f"{proxy.url}/v1/models", timeout=LIMIT_S).json()
    assert models == httpx.get(f"{pair.decode.url}/v1/models", timeout=LIMIT_S).json()
    tokens = httpx.post(f"{proxy.url}/tokenize", json={"prompt": "a b c"}, timeout=LIMIT_S).json()["tokens"]
    assert (
        tokens == httpx.post(f"{pair.decode.url}/tokenize", json={"prompt": "a b c"}, timeout=LIMIT_S).json()["tokens"]
    )
    wrong = httpx.post(proxy.url + COMPLETIONS, json={"prompt": "x", "max_token": 3}, timeout=LIMIT_S)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unknown_field")
    assert "did you mean 'max_tokens'" in wrong.json()["error"]["message"]


class Story:
    """Two prefill and two decode workers, and what happens to them."""

    def __init__(self, model: Path, key_file: Path) -> None:
        self.prefill = [start_worker(model, key_file, "kv_producer") for _ in range(2)]
        self.decode = [start_worker(model, key_file, "kv_consumer") for _ in range(2)]
        for worker in self.workers:
            worker.wait()
        self.proxy = RunningProxy(
            *([worker.url for worker in workers] for workers in (self.prefill, self.decode)),
            *("--prefill-limit", str(PREFILL_LIMIT_S), "--health-interval", "0.5"),
        ).wait()

    @property
    def workers(self) -> list[RunningServer]:
        return self.prefill + self.decode

    def check(self, name: str, *, by: RunningServer) -> None:
        """Several requests at a time get the text of a single worker."""
        requests = bodies(name)

        def ask(number: int) -> httpx.Response:
            path, body = requests[number]
            return httpx.post(self.proxy.url + path, json=body, timeout=LIMIT_S)

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(len(requests))))
        for (path, body), answer in zip(requests, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert texts_of(answer.json()) == alone(by, path, body)

    def stop(self) -> None:
        self.proxy.stop()
        for worker in self.workers:
            for number in (signal.SIGCONT, signal.SIGTERM):
                if worker.process.poll() is None:
                    worker.process.send_signal(number)
        for worker in self.workers:
            worker.stop()


def kill(worker: RunningServer) -> None:
    """End a worker at once, with its engine."""
    engine = worker.engine_pid
    worker.process.kill()
    worker.process.wait(LIMIT_S)
    try:
        os.kill(engine, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_workers_may_die_or_stop_and_the_text_stays_right(tiny_model_path: Path, key_file: Path) -> None:
    story = Story(tiny_model_path, key_file)
    try:
        (p1, p2), (d1, d2) = story.prefill, story.decode
        story.check("all", by=d2)
        assert all(counters(worker)["fetches"] > 0 for worker in (d1, d2))

        kill(p1)
        story.check("without one prefill worker", by=d2)
        assert counters(p2)["handed_over"] > 0

        # A suspended worker still accepts connections.
        stop(p2.process)
        began_s = time.monotonic()
        story.check("with a prefill worker that is stopped", by=d2)
        assert time.monotonic() - began_s < LIMIT_S
        p2.process.send_signal(signal.SIGCONT)

        kill(p2)
        story.check("without prefill workers", by=d2)

        text, events = stream_while(story, lambda serving: kill(serving))
        assert events[-1]["error"]["code"] == "worker_lost"
        survivor = d1 if d1.process.poll() is None else d2
        whole = alone(survivor, COMPLETIONS, LONG)[0][0]
        assert text
        assert whole.startswith(text)
        story.check("with one decode worker", by=survivor)
        assert "Traceback" not in story.proxy.log
    finally:
        story.stop()


LONG = {"prompt": STORY, "temperature": 0, "max_tokens": 400, "ignore_eos": True}


def stream_while(story: Story, act: object) -> tuple[str, list[dict[str, object]]]:
    """Streams a long answer, and does this to the worker that writes it, after its first events."""
    lines: list[str] = []
    with httpx.stream("POST", story.proxy.url + COMPLETIONS, json=LONG | {"stream": True}, timeout=LIMIT_S) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 6:
                running = [worker for worker in story.decode if _running(worker)]
                assert len(running) == 1
                act(running[0])  # type: ignore[operator]
    return joined(lines)


def _running(worker: RunningServer) -> bool:
    metrics = httpx.get(f"{worker.url}/metrics", timeout=LIMIT_S).text.splitlines()
    line = next(line for line in metrics if line.startswith("outrider:num_requests_running{"))
    return float(line.rsplit(" ", 1)[1]) > 0
