"""What the front end costs: a cluster of one worker beside `outrider serve`, in turns on one machine."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from outrider.tools.bench.server_process import ServerProcess
from outrider.tools.fleet.chats import QUESTIONS
from outrider.tools.fleet.client import Streamed, ask
from outrider.tools.fleet.process import ClusterError, ClusterProcess

TOKENS = 128
ENGINE = {"kv_cache_memory_bytes": 512 << 20, "max_model_len": 2048}


@dataclass(frozen=True, kw_only=True)
class OverheadResult:
    at_a_time: int
    direct_tokens_s: float
    cluster_tokens_s: float
    direct_ttft_s: float
    cluster_ttft_s: float

    @property
    def ratio(self) -> float:
        return self.cluster_tokens_s / self.direct_tokens_s

    @property
    def later_s(self) -> float:
        return self.cluster_ttft_s - self.direct_ttft_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "later_s": self.later_s}


def run_overhead(directory: Path, *, at_a_time: list[int], rounds: int) -> list[OverheadResult]:
    """Measure both servers in turns. While one is measured, the other one is idle."""
    flags = [item for name, value in ENGINE.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    direct = ServerProcess(flags)
    cluster = ClusterProcess({"replicas": 1, "worker": ENGINE}, directory)
    try:
        direct.wait_ready()
        cluster.wait_ready()
        urls = {"direct": direct.url, "cluster": cluster.url}
        for url in urls.values():
            _measure(url, 2, 0)
        results = []
        for clients in at_a_time:
            rates: dict[str, list[float]] = {name: [] for name in urls}
            firsts: dict[str, list[float]] = {name: [] for name in urls}
            for number in range(rounds):
                order = list(urls.items()) if number % 2 == 0 else list(urls.items())[::-1]
                for name, url in order:
                    rate, ttfts = _measure(url, clients, number + 1)
                    rates[name].append(rate)
                    firsts[name] += ttfts
            results.append(
                OverheadResult(
                    at_a_time=clients,
                    direct_tokens_s=median(rates["direct"]),
                    cluster_tokens_s=median(rates["cluster"]),
                    direct_ttft_s=median(firsts["direct"]),
                    cluster_ttft_s=median(firsts["cluster"]),
                )
            )
        return results
    finally:
        cluster.stop()
        direct.stop()


def _measure(url: str, clients: int, number: int) -> tuple[float, list[float]]:
    """Returns tokens per second and times to the first token of two chats for each client."""

    def one(place: int) -> Streamed:
        text = f"Round {number}, question {place}: {QUESTIONS[place % len(QUESTIONS)]}"
        return ask(url, [{"role": "user", "content": text}], max_tokens=TOKENS, ignore_eos=True)

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(one, range(2 * clients)))
    seconds = time.perf_counter() - started
    problems = [answer.error for answer in answers if answer.error is not None]
    if problems:
        raise ClusterError(f"a request failed: {problems[0]}")
    return TOKENS * len(answers) / seconds, [answer.ttft_s for answer in answers if answer.ttft_s is not None]
