"""Many requests, while workers are killed at random moments: no wrong text, no hang, and nothing left behind."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from outrider.tools.fleet.chats import ENGINE, Chat, chats, right_answers
from outrider.tools.fleet.client import Streamed, ask
from outrider.tools.fleet.process import ClusterProcess

AT_A_TIME = 4
TOKENS = 60
REQUEST_LIMIT_S = 120.0
QUIET_LIMIT_S = 60.0


@dataclass(kw_only=True)
class KillsReport:
    requests: int
    kills: int = 0
    wrong: int = 0
    hangs: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """How many requests failed, by error."""
    moved: int = 0
    """Requests that went on with another worker."""
    longest_gap_s: float = 0.0
    left: dict[str, dict[str, float]] = field(default_factory=dict)
    """What workers still hold although nothing runs: empty if all pages are back."""

    @property
    def is_right(self) -> bool:
        return not (self.wrong or self.hangs or self.left)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "failures": dict(self.failures), "is_right": self.is_right}


def run_kills(directory: Path, *, requests: int, kills: int, seed: int, apart: bool) -> KillsReport:
    """`apart`: two prefill and two decode workers instead of three that do everything."""
    workers = {"prefill": 2, "decode": 2} if apart else {"replicas": 3}
    wanted = chats(requests, tokens=TOKENS)
    report = KillsReport(requests=requests)
    cluster = ClusterProcess({**workers, "worker": {**ENGINE, "num_threads": 1}}, directory)
    try:
        cluster.wait_ready()
        answers = _ask_while_killing(cluster, wanted, kills, Random(seed), report)
        cluster.wait_ready()
        report.left = _left_behind(cluster)
        log = cluster.log_of_requests()
    finally:
        cluster.stop()
    right = right_answers(wanted)
    for answer, text in zip(answers, right, strict=True):
        if answer.error is None:
            report.wrong += answer.text != text
        elif "no end within" in answer.error or "timed out" in answer.error:
            report.hangs += 1
        else:
            # What came before an error must be right all the same.
            report.wrong += not text.startswith(answer.text)
            report.failures[answer.error[:160]] += 1
    report.longest_gap_s = max(answer.longest_gap_s for answer in answers)
    starts = Counter((entry["request"], entry["role"]) for entry in log if entry["event"] == "start")
    report.moved = len({request for (request, _role), count in starts.items() if count > 1})
    return report


def _ask_while_killing(
    cluster: ClusterProcess, wanted: list[Chat], kills: int, draw: Random, report: KillsReport
) -> list[Streamed]:
    """Send all requests, and wait with the next ones until as many workers have been killed as were asked for."""
    done, finished = [0], threading.Event()

    def one(chat: Chat) -> Streamed:
        # Kills are spread over the requests.
        while report.kills < min(kills, done[0] * kills // len(wanted)) and not finished.is_set():
            time.sleep(0.05)
        answer = ask(cluster.url, chat.messages, limit_s=REQUEST_LIMIT_S, **chat.settings)
        done[0] += 1
        return answer

    def strike() -> None:
        while report.kills < kills and not finished.is_set():
            time.sleep(draw.uniform(0.2, 2.0))
            up = [worker["name"] for worker in cluster.workers if worker["state"] == "serves"]
            # One of each kind survives, so that there is somewhere to go on.
            kinds = Counter(name.rpartition("-")[0] for name in up)
            victims = [name for name in up if kinds[name.rpartition("-")[0]] > 1]
            if victims and cluster.kill(draw.choice(victims)):
                report.kills += 1

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return list(pool.map(one, wanted))
    finally:
        finished.set()
        thread.join()


def _left_behind(cluster: ClusterProcess) -> dict[str, dict[str, float]]:
    """Returns what workers still hold, once leases have had the time to end."""
    names = ("running_requests", "kv_usage", "kv_leases")
    deadline = time.monotonic() + QUIET_LIMIT_S
    while True:
        left = {
            worker: held
            for worker, figures in cluster.figures().items()
            if (held := {name: figures[name] for name in names if figures.get(name)})
        }
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(1.0)
