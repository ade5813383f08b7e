"""A server publishes what its prefix cache holds, also after its engine was replaced."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.events.llmd_reader import Reader
from tests.server.conftest import FIXED_DRAFTS, TINY
from tests.server.running import RunningServer, wait_until


def test_events_of_a_server_are_those_of_its_engine_at_hand(tiny_model_path: Path, tmp_path: Path) -> None:
    addresses = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    config = json.dumps({"enable_kv_cache_events": True, **addresses})
    options = (*TINY, *FIXED_DRAFTS, "--served-model-name", "tiny", "--kv-events-config", config)
    server = RunningServer(tiny_model_path, *options).wait()
    reader = Reader(addresses["endpoint"], addresses["replay_endpoint"])
    try:
        prompt = [5 + place % 40 for place in range(70)]
        with server.http() as http:

            def complete() -> int:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert complete() == 0
            reader.replay()
            reader.read()
            announced = max(len(text) - 1 for text in reader.texts.values())
            # A fully cached prompt computes its last token again.
            assert announced == 64
            assert complete() >= announced
            os.kill(server.engine_pid, signal.SIGKILL)
            reader.last = None
            reader.replay()
            assert reader.texts == {}
            wait_until(lambda: http.get("/ready").status_code == 200)
            assert complete() == 0
        assert {topic.split("@")[2] for topic in reader.topics} == {"tiny"}
        assert reader.problems == []
    finally:
        reader.close()
        server.stop()
