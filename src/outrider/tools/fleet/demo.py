"""scripts/demo-cluster: two prefill and two decode workers behind one address, and what happens when two die."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.errors import OutriderError
from outrider.tools.fleet.chats import ENGINE, Chat, chats, right_answers
from outrider.tools.fleet.client import Streamed, ask
from outrider.tools.fleet.network import enter_own_network
from outrider.tools.fleet.process import ClusterProcess

CHATS = 20
AT_A_TIME = 4
TOKENS = 80
BACK_LIMIT_S = 180.0
PLAN = {"prefill": 2, "decode": 2, "worker": {**ENGINE, "num_threads": 1}}


class Killer:
    """Kills the worker of a role that is busy, once."""

    def __init__(self, cluster: ClusterProcess, role: str) -> None:
        self._cluster = cluster
        self._role = role
        self.victim: str | None = None
        self.requests: list[str] = []
        """The requests that the worker had begun."""
        self.killed_s = 0.0

    def strike(self, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while self.victim is None and time.monotonic() < deadline:
            busy = self._cluster.busy_with(self._role)
            if busy:
                victim = next(reversed(busy.values()))
                if self._cluster.kill(victim):
                    self.victim, self.killed_s = victim, time.perf_counter()
                    self.requests = [request for request, worker in busy.items() if worker == victim]
            time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo-cluster", description=__doc__)
    parser.add_argument("--chats", type=int, default=CHATS, help="number of chats")
    parser.add_argument("--keep", type=Path, help="directory to keep logs in")
    given = parser.parse_args()
    try:
        enter_own_network("-m", "outrider.tools.fleet.demo", *sys.argv[1:])
        with tempfile.TemporaryDirectory(prefix="outrider-demo-") as temporary:
            is_right = show(Console(highlight=False, soft_wrap=True), given.keep or Path(temporary), given.chats)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(0 if is_right else 1)


def show(console: Console, directory: Path, number: int) -> bool:
    wanted = chats(number, tokens=TOKENS)
    cluster = ClusterProcess(PLAN, directory)
    try:
        console.print("starting a front end, two prefill and two decode workers; each loads the model …")
        cluster.wait_ready()
        console.print(f"serving at {cluster.url}; streaming {number} chats, {AT_A_TIME} at a time")
        answers, killers = _stream(cluster, wanted)
        for killer in killers:
            console.print(f"killed {killer.victim}, which had begun {len(killer.requests)} request(s)")
        back_s = _wait_until_back(cluster)
        console.print(f"all workers serve again {back_s:.1f} s after the chats, by themselves")
        log = cluster.log_of_requests()
        restarts = {member["name"]: member["restarts"] for member in cluster.state["members"] if member["restarts"]}
    finally:
        status = cluster.stop()
    console.print(f"started again: {restarts}; the cluster ended with status {status}")
    console.print("asking one engine the same …")
    right = right_answers(wanted)
    wrong = [place for place, answer in enumerate(answers) if answer.error or answer.text != right[place]]
    _print_gaps(console, answers, log)
    _print_routing(console, log)
    for place in wrong:
        console.print(f"chat {place} differs: {answers[place].error or answers[place].text!r}, not {right[place]!r}")
    killed = all(killer.victim for killer in killers)
    console.print(f"{number - len(wrong)} of {number} texts equal a single engine's")
    return not wrong and killed and bool(restarts) and status == 0


def _stream(cluster: ClusterProcess, wanted: list[Chat]) -> tuple[list[Streamed], list[Killer]]:
    """Stream all chats, while a decode worker dies in the middle of a text and a prefill worker in that of a prompt."""
    killers = [Killer(cluster, "decode"), Killer(cluster, "prefill")]
    texts = threading.Event()
    done = [0]

    def note(answer: Streamed) -> None:
        if len(answer.text) > 40 and done[0] >= 2:
            texts.set()

    def one(chat: Chat) -> Streamed:
        answer = ask(cluster.url, chat.messages, on_text=note, **chat.settings)
        done[0] += 1
        return answer

    def strike() -> None:
        texts.wait(60)
        killers[0].strike()
        while done[0] < len(wanted) // 2:
            time.sleep(0.02)
        killers[1].strike()

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = list(pool.map(one, wanted))
    thread.join(5)
    return answers, killers


def _wait_until_back(cluster: ClusterProcess) -> float:
    started = time.monotonic()
    cluster.wait_ready(BACK_LIMIT_S)
    return time.monotonic() - started


def _print_gaps(console: Console, answers: list[Streamed], log: list[dict[str, Any]]) -> None:
    """Show how long the texts stood still that went on with another worker."""
    starts: dict[tuple[str, str], list[str]] = {}
    for entry in log:
        if entry["event"] == "start":
            starts.setdefault((entry["request"], entry["role"]), []).append(entry["worker"])
    moved = {request for (request, _role), workers in starts.items() if len(workers) > 1}
    gaps = sorted((answer.longest_gap_s for answer in answers), reverse=True)[: max(1, len(moved))]
    shown = ", ".join(f"{1000 * gap:.0f}" for gap in gaps)
    console.print(f"{len(moved)} request(s) went on with another worker; longest gaps within texts: {shown} ms")


def _print_routing(console: Console, log: list[dict[str, Any]]) -> None:
    """Draw which worker got what, and why: what it had cached of the prompt."""
    workers = sorted({entry["worker"] for entry in log}, key=lambda name: (not name.startswith("prefill"), name))
    requests = list(dict.fromkeys(entry["request"] for entry in log))
    table = Table(title="which worker got which request, in order", box=None, pad_edge=False)
    table.add_column("request")
    table.add_column("prompt", justify="right")
    for worker in workers:
        table.add_column(worker)
    for request in requests:
        entries = [entry for entry in log if entry["request"] == request]
        cells = [_cell([entry for entry in entries if entry["worker"] == worker]) for worker in workers]
        table.add_row(request[:8], str(entries[0]["prompt_tokens"]), *cells)
    console.print(table)
    console.print(
        "P: computed the prompt, of which so many tokens were cached there, which is why it was chosen (without any, "
        "the least busy one is); D: wrote so many tokens, with the KV of so many tokens from P; †: died meanwhile"
    )


def _cell(entries: list[dict[str, Any]]) -> str:
    ends = [entry for entry in entries if entry["event"] == "end"]
    starts = [entry for entry in entries if entry["event"] == "start"]
    if not starts:
        return ""
    letter = "P" if starts[0]["role"] == "prefill" else "D"
    if len(ends) < len(starts):
        return f"{letter} †"
    last = ends[-1]
    if letter == "P":
        return f"P cached {last['cached_tokens']}"
    return f"D {last['generated_tokens']}, KV {last['transferred_tokens']}"


if __name__ == "__main__":
    main()
