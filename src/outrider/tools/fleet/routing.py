"""Conversations of several turns over several workers: how much of their prompts is found cached, by router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from outrider.tools.fleet.chats import QUESTIONS
from outrider.tools.fleet.client import Message, ask
from outrider.tools.fleet.process import ClusterError, ClusterProcess

WORKERS = 4
TOKENS = 40
AT_A_TIME = 4
KV_BYTES = 256 << 20
"""Memory for KV of all workers together; one worker alone has all of it."""


@dataclass(frozen=True, kw_only=True)
class RoutingResult:
    router: str
    workers: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    """Median time to the first token."""
    busiest_share: float
    """Share of the requests that the busiest worker got."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": self.hit_rate}


def run_routing(directory: Path, *, conversations: int, turns: int) -> list[RoutingResult]:
    """Returns results of one worker with all the memory, of several with KV-aware routing, and in turns."""
    setups = (("one worker", "round-robin", 1), ("kv", "kv", WORKERS), ("round-robin", "round-robin", WORKERS))
    return [
        _measure(directory / name.replace(" ", "-"), name, router, workers, conversations, turns)
        for name, router, workers in setups
    ]


def _measure(directory: Path, name: str, router: str, workers: int, conversations: int, turns: int) -> RoutingResult:
    options = {"kv_cache_memory_bytes": KV_BYTES // workers, "max_model_len": 2048, "num_threads": 1}
    cluster = ClusterProcess({"replicas": workers, "router": router, "worker": options}, directory)
    try:
        cluster.wait_ready()
        before = len(cluster.log_of_requests())
        texts: list[list[Message]] = [[] for _ in range(conversations)]
        totals, ttfts = [0, 0], []
        for turn in range(turns):
            with ThreadPoolExecutor(AT_A_TIME) as pool:
                results = pool.map(partial(_turn, cluster.url, turn), texts, range(conversations))
                for prompt, cached, ttft in results:
                    totals[0] += prompt
                    totals[1] += cached
                    ttfts.append(ttft)
        log = [entry["worker"] for entry in cluster.log_of_requests()[before:] if entry["event"] == "end"]
    finally:
        cluster.stop()
    busiest = max(map(log.count, set(log))) / len(log)
    return RoutingResult(
        router=name,
        workers=workers,
        prompt_tokens=totals[0],
        cached_tokens=totals[1],
        ttft_s=median(ttfts),
        busiest_share=busiest,
    )


def _turn(url: str, turn: int, messages: list[Message], place: int) -> tuple[int, int, float]:
    question = f"Conversation {place}: {QUESTIONS[(place + turn) % len(QUESTIONS)]}"
    messages.append({"role": "user", "content": question})
    answer = ask(url, messages, max_tokens=TOKENS, ignore_eos=True)
    if answer.error is not None or answer.ttft_s is None:
        raise ClusterError(f"a request failed: {answer.error or 'no text'}")
    messages.append({"role": "assistant", "content": answer.text})
    return answer.prompt_tokens, answer.cached_tokens, answer.ttft_s
