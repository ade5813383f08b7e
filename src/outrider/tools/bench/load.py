"""A server under load: many clients, random requests, some malformed, some abandoned; then what is left is counted.

Whatever clients do, three things must hold. Every request gets a complete answer, and none is a 500 (only an engine
that was killed may end one early, with an error). When all clients have gone, every KV page is free again and no
process has kept memory or files. And the sanitizer has reported nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.tools.bench.http_client import Client
from outrider.tools.bench.process_memory import resident_mb
from outrider.tools.bench.server_process import ServerProcess, open_files, wait_until

ADMIN_KEY = "key-of-the-load-test"
MALFORMED = (
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "x", "temperature": -3}',
    b'{"prompt": "x", "unknown_field": 1}',
    b'{"prompt": "x", "logprobs": 10000}',
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "\\ud800"}',
    b"\xff\xfe\x00",
)
MALFORMED_FRACTION, ABANDONED_FRACTION = 0.05, 0.25
WORDS = "river stone light garden winter letter bridge morning engine paper silver forest answer".split()  # noqa: SIM905
IDLE_LIMIT_S = 60.0
BACK_OFF_S = 0.5
"""Pause of a client after a 429 or a 503."""
RECOVERY_LIMIT_S = 120.0
KILLED_CODE = "unavailable"
"""Error code of a stream whose engine was killed."""
SETTLED_FRACTION = 1 / 6
"""Fraction of the run after which a process under load has reached its steady memory."""
MEMORY_GROWTH_MB_MAX = 64.0
"""Growth allowed after a process has settled; allocators keep some memory."""
FILES_GROWTH_MAX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    clients: int = 32
    minutes: float = 1.0
    kills: int = 1
    """Number of times that the engine process is killed, spread over the run."""
    seed: int = 0
    max_tokens: int = 48

    def __post_init__(self) -> None:
        if self.clients < 1 or self.minutes <= 0 or self.kills < 0:
            raise ConfigError("clients must be at least 1, minutes above 0 and kills at least 0")


@dataclass(slots=True)
class ClientRecord:
    """What all clients observed; guarded by its lock."""

    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    abandoned: int = 0
    """Streams that the client closed early."""
    streams_cut: int = 0
    """Streams that ended with an error event, because the engine was killed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_problem(self, problem: str) -> None:
        with self.lock:
            self.problems.append(problem)

    def add_answer(self, kind: str, status: int, text: str = "") -> None:
        with self.lock:
            self.statuses[f"{kind} {status}"] += 1
            if status == 500 or (kind == "malformed" and status < 400):
                self.problems.append(f"{kind} answered with {status}: {text[:300]}")


def run_load(server: ServerProcess, config: LoadConfig) -> dict[str, Any]:
    """`server` runs with ADMIN_KEY as its admin key and the sanitizer on."""
    record, stop = ClientRecord(), threading.Event()
    threads = [
        threading.Thread(target=send_requests, args=(server.url, config, number, record, stop), daemon=True)
        for number in range(config.clients)
    ]
    begun, limit_s = time.monotonic(), config.minutes * 60
    for thread in threads:
        thread.start()
    before: dict[int, Footprint] = {}
    recoveries_s: list[float] = []
    settled_s = limit_s / 3
    kills = [limit_s * (0.4 + 0.5 * number / max(1, config.kills)) for number in range(config.kills)]
    while time.monotonic() - begun < limit_s:
        elapsed = time.monotonic() - begun
        if elapsed > settled_s:
            # Processes that were measured before keep their first footprint.
            before, settled_s = _settled(server) | before, limit_s
        if kills and elapsed > kills[0]:
            kills.pop(0)
            recoveries_s.append(_kill_engine(server, record))
            settled_s = min(settled_s, time.monotonic() - begun + limit_s * SETTLED_FRACTION)
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(IDLE_LIMIT_S)
    return _report(server, config, record, before, recoveries_s)


def _kill_engine(server: ServerProcess, record: ClientRecord) -> float:
    """Kills the engine process; returns the seconds until requests are served again."""
    client = Client(server.url)
    os.kill(server.engine_pid, signal.SIGKILL)
    begun = time.monotonic()
    wait_until(lambda: client.get("/ready")[0] == 503, 5.0)
    if not wait_until(lambda: client.get("/ready")[0] == 200, RECOVERY_LIMIT_S):
        record.problems.append("the engine was killed, and no other one replaced it")
    client.close()
    return time.monotonic() - begun


class Footprint(NamedTuple):
    resident_mb: float
    files: int


def _footprints(server: ServerProcess) -> dict[int, Footprint]:
    pids = [server.process.pid, *(pid for several in server.children().values() for pid in several)]
    return {pid: Footprint(resident_mb(pid), open_files(pid)) for pid in pids}


def _settled(server: ServerProcess) -> dict[int, Footprint]:
    """Footprints of the processes; free KV pages count as resident, because they become so when first used."""
    found, engine = _footprints(server), server.engine_pid
    client = Client(server.url)
    free_mb = free_megabytes(json.loads(client.get("/kv")[1]))
    client.close()
    return found | {engine: Footprint(found[engine].resident_mb + free_mb, found[engine].files)}


def free_megabytes(pages: dict[str, Any]) -> float:
    """Returns the size of the free pages in an answer of /kv."""
    free_bytes = 0
    for arena in pages["arenas"]:
        free_bytes += arena["page_bytes"] * sum(int(count) for count in re.findall(r"(\d+)f", arena["runs"]))
    return free_bytes / 2**20


def growth_of(before: dict[int, Footprint], after: dict[int, Footprint]) -> dict[int, Footprint]:
    return {
        pid: Footprint(now.resident_mb - before[pid].resident_mb, now.files - before[pid].files)
        for pid, now in after.items()
        if pid in before
    }


def problems_left(pages: dict[str, Any], violations: float, log: str, growth: dict[int, Footprint]) -> list[str]:
    """Returns the problems of a server whose clients have all gone and whose cache was reset."""
    problems = []
    leaked = [arena["runs"] for arena in pages["arenas"] if arena["runs"] != f"1k{arena['pages'] - 1}f"]
    if leaked:
        problems.append(f"pages are not free although no request holds them: {leaked}")
    if violations or "broken at step" in log:
        problems.append(f"the sanitizer reported {violations:.0f} broken invariants")
    if "Traceback" in log:
        problems.append("the server's log has a traceback:\n" + log[log.index("Traceback") :][:1500])
    for pid, grown in growth.items():
        if grown.resident_mb > MEMORY_GROWTH_MB_MAX or grown.files > FILES_GROWTH_MAX:
            problems.append(f"process {pid} has grown by {grown.resident_mb:.0f} MB and {grown.files} files")
    if not growth:
        problems.append("no process lived long enough to be measured; let the load go on for longer")
    return problems


def unexpected_ends(ended: float, killed: int) -> list[str]:
    return [f"an engine ended {ended:.0f} times, but was killed {killed} times"] if ended != killed else []


def _report(
    server: ServerProcess,
    config: LoadConfig,
    record: ClientRecord,
    before: dict[int, Footprint],
    recoveries_s: list[float],
) -> dict[str, Any]:
    client, admin = Client(server.url), Client(server.url, key=ADMIN_KEY)
    problems = record.problems
    if not wait_until(lambda: _metric(client, "num_requests_running") == 0, IDLE_LIMIT_S):
        problems.append("requests still run although every client has gone")
    admin.post("/admin/reset_prefix_cache", {})
    time.sleep(0.2)  # an answer of /kv may be this old
    pages = json.loads(client.get("/kv")[1])
    growth = growth_of(before, _footprints(server))
    problems += problems_left(pages, _metric(client, "sanitizer_violations_total"), server.log, growth)
    problems += unexpected_ends(_metric(client, "engine_restarts_total"), len(recoveries_s))
    client.close()
    admin.close()
    return {
        "clients": config.clients,
        "minutes": config.minutes,
        "requests": sum(record.statuses.values()),
        "statuses": dict(sorted(record.statuses.items())),
        "left_early": record.abandoned,
        "streams_cut": record.streams_cut,
        "kills": len(recoveries_s),
        "recovery_s": max(recoveries_s, default=None),
        "processes_measured": len(growth),
        "memory_growth_mb": max((grown.resident_mb for grown in growth.values()), default=0.0),
        "files_growth": max((grown.files for grown in growth.values()), default=0),
        "problems": problems,
    }


def _metric(client: Client, name: str) -> float:
    lines = client.get("/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"outrider:{name}{{"))


# ---- one client ------------------------------------------------------------------------------------


def send_requests(url: str, config: LoadConfig, number: int, record: ClientRecord, stop: threading.Event) -> None:
    chance = random.Random(f"{config.seed}/{number}")
    client = Client(url)
    while not stop.is_set():
        try:
            _one_request(client, config, chance, record)
        except Exception as problem:
            # Half an answer or none: not even a killed engine may cause that.
            record.add_answer("broken off", 0)
            record.add_problem(f"an answer broke off: {problem!r}")
            client.close()
    client.close()


def _one_request(client: Client, config: LoadConfig, chance: random.Random, record: ClientRecord) -> None:
    if chance.random() < MALFORMED_FRACTION:
        answer = client.send("POST", "/v1/completions", chance.choice(MALFORMED))
        record.add_answer("malformed", answer.status, answer.read().decode(errors="replace"))
        return
    path, body = _request(config, chance)
    if chance.random() < 0.3:
        status, answer = client.post(path, body)
        record.add_answer("whole", status, json.dumps(answer))
        if status in (429, 503):
            time.sleep(BACK_OFF_S)
        return
    abandons_after = chance.randrange(1, 12) if chance.random() < ABANDONED_FRACTION else None
    stream = client.stream(path, body)
    record.add_answer("stream", stream.status)
    if stream.status != 200:
        client.close()
        time.sleep(BACK_OFF_S)
        return
    for count, event in enumerate(stream.events()):
        if "error" in event:
            with record.lock:
                record.streams_cut += 1
            if event["error"].get("code") != KILLED_CODE:
                record.add_problem(f"a stream ended with an error: {event['error']}")
        if count == abandons_after:
            with record.lock:
                record.abandoned += 1
            client.close()
            return
    if not stream.complete:
        record.add_problem("a stream stopped without its final event")
        client.close()


def _request(config: LoadConfig, chance: random.Random) -> tuple[str, dict[str, Any]]:
    text = " ".join(chance.choices(WORDS, k=chance.randrange(3, 60)))
    body: dict[str, Any] = {
        "max_tokens": chance.randrange(1, config.max_tokens),
        "temperature": chance.choice([0, 0.7, 1.0]),
        "seed": chance.randrange(1000),
        "n": chance.choice([1, 1, 1, 2, 3]),
    }
    for name, value in (
        ("stop", [chance.choice(WORDS)]),
        ("presence_penalty", 0.5),
        ("top_p", 0.9),
        ("cache_salt", chance.choice("ab")),
        ("priority", chance.randrange(3)),
    ):
        if chance.random() < 0.2:
            body[name] = value
    if chance.random() < 0.5:
        return "/v1/completions", body | {"prompt": text}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
