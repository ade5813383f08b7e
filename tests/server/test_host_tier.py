"""A server with memory of the host behind its KV cache, under clients that come and go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.server.running import RunningServer

SIZES = ("--kv-cache-memory-bytes", "128K", "--max-model-len", "256", "--max-num-seqs", "4")
CHECKS = ("--sanitizer", "raise", "--sanitizer-level", "bytes")


def tier_metrics(client: httpx.Client) -> dict[str, float]:
    """Returns the counters of the host tier, by their names without the prefix."""
    text = client.get("/metrics").text
    return {
        sample.name.partition(":")[2]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("tier") == "host"
    }


def test_evicted_prompts_come_back_under_load_and_metrics_tell(tiny_model_path: Path) -> None:
    options = ("--backend", "reference", "--num-threads", "1", *SIZES, *CHECKS, "--kv-offloading-size", "0.02")
    server = RunningServer(tiny_model_path, *options, "--served-model-name", "tiny")
    chance = Random(3)
    prompts = [[chance.randrange(20, 200) for _ in range(150)] for _ in range(10)]
    try:
        with server.wait().http() as client:

            def complete(prompt: list[int]) -> tuple[str, int]:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                found = answer.json()
                return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

            def leave(prompt: list[int]) -> None:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 90, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_lines())

            first = [complete(prompt) for prompt in prompts]
            with ThreadPoolExecutor(5) as clients:
                leaving = [clients.submit(leave, prompt) for prompt in prompts[::3]]
                again = list(clients.map(complete, prompts[::-1] + prompts))
            for each in leaving:
                each.result()
            assert [text for text, _cached in again] == [text for text, _cached in first[::-1] + first]
            assert sum(cached for _text, cached in again) > 0.5 * 20 * 144, again
            counters = tier_metrics(client)
        assert counters["kv_tier_loaded_pages_total"] > 20
        assert counters["kv_tier_stored_pages_total"] >= 80
        assert counters["kv_tier_refused_pages_total"] == 0
        assert counters["kv_tier_looked_up_pages_total"] >= counters["kv_tier_found_pages_total"] > 20
        assert counters["kv_tier_loaded_bytes_total"] > 0
        assert counters["kv_tier_load_seconds_total"] > 0
        assert "broken at step" not in server.log, server.log
        assert "Traceback" not in server.log, server.log
    finally:
        assert server.stop() == 0, server.log
