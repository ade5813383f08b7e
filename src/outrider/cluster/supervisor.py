"""Starts the front end and the workers of a cluster on one machine, watches them, and ends them in order."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType

from outrider.cluster.environment import LOOPBACK, one_machine
from outrider.cluster.members import Member, fetch
from outrider.cluster.plan import ClusterPlan, as_flags
from outrider.cluster.settings import Role
from outrider.errors import ConfigError

TICK_S = 0.1
LOOK_S = 1.0
DEFAULT_KV_BYTES = 2 << 30
"""Memory for KV of all workers together, where the plan names none."""
DISCOVERY_FOLDERS = ("instances", "mdc")
STATE_FILE = "cluster.json"
FRONTEND = "frontend"
DESCRIBES_THE_MODEL = ("max_model_len", "block_size")
"""Options of workers that the front end must hear from all of them alike."""
DYNAMO_GRACE_S = 15.0
FRONTEND_LIMIT_S = 10.0
SYSTEM_PORTS = range(20_000, 32_768)


class Supervisor:
    def __init__(self, plan: ClusterPlan, directory: Path, *, on_change: Callable[[str], None]) -> None:
        self.plan = plan
        self.directory = directory
        self._discovery = directory / "discovery"
        self._discovery.mkdir(parents=True, exist_ok=True)
        self._logs = directory / "logs"
        self._logs.mkdir(exist_ok=True)
        self._on_change = on_change
        self._told = threading.Event()
        self._looked_at = 0.0
        self._environment = one_machine(self._discovery)
        if plan.decode:
            self._environment["OUTRIDER_CLUSTER_KEY"] = secrets.token_urlsafe(32)
        self.members = [self._frontend(), *self._workers()]

    @property
    def url(self) -> str:
        return f"http://{self.plan.host}:{self.plan.port}"

    @property
    def workers(self) -> list[Member]:
        return [member for member in self.members if member.state_file is not None]

    @property
    def is_ready(self) -> bool:
        """Whether all workers serve and the front end knows the model."""
        return all(member.ready_since is not None for member in self.workers) and self._knows_model()

    def _knows_model(self) -> bool:
        text = fetch(f"{self.url}/v1/models")
        return text is not None and bool(json.loads(text).get("data"))

    # ---- what runs ---------------------------------------------------------------------------------

    def _frontend(self) -> Member:
        plan = self.plan
        options = {
            "http_host": plan.host,
            "http_port": plan.port,
            "router_mode": plan.router,
            "migration_limit": plan.migration_limit,
            "namespace": plan.namespace,
            **plan.frontend,
        }
        return Member(
            name=FRONTEND,
            role=FRONTEND,
            command=[sys.executable, "-m", "dynamo.frontend", *as_flags(options)],
            environment=self._environment,
            log=self._logs / f"{FRONTEND}.log",
            url=self.url,
            first_wait_s=plan.restart_first_s,
            most_wait_s=plan.restart_most_s,
        )

    def _workers(self) -> list[Member]:
        numbers: dict[Role, int] = {}
        members = []
        for role in self.plan.roles:
            numbers[role] = numbers.get(role, 0) + 1
            members.append(self._worker(role, f"{role.value}-{numbers[role]}"))
        if self.plan.decode:
            members.append(self._stand_in())
        return members

    def _worker(self, role: Role, name: str) -> Member:
        plan, count, port, state = self.plan, len(self.plan.roles), free_port(), self.directory / f"{name}.instance"
        options = {
            "num_threads": max(1, (os.cpu_count() or 1) // count),
            "kv_cache_memory_bytes": DEFAULT_KV_BYTES // count,
            "request_log": self.directory / "requests.jsonl",
            "drain_limit": plan.drain_s,
            **plan.options(role),
            "role": role.value,
            "name": name,
            "system_port": port,
            "state_file": state,
        }
        return self._member(name, role.value, options, url=f"http://{LOOPBACK}:{port}", state=state)

    def _stand_in(self) -> Member:
        given = self.plan.options(Role.PREFILL)
        options = {name: given[name] for name in DESCRIBES_THE_MODEL if name in given}
        return self._member("stand-in", "stand-in", {**options, "role": "stand-in"}, url="", state=None)

    def _member(self, name: str, role: str, options: dict[str, object], *, url: str, state: Path | None) -> Member:
        plan = self.plan
        model = [] if plan.model is None else [plan.model]
        options = {"discovery": self._discovery, "namespace": plan.namespace, **options}
        if plan.served_model_name is not None:
            options["served_model_name"] = plan.served_model_name
        return Member(
            name=name,
            role=role,
            command=[sys.executable, "-m", "outrider", "worker", *model, *as_flags(options)],
            environment=self._environment,
            log=self._logs / f"{name}.log",
            url=url,
            state_file=state,
            first_wait_s=plan.restart_first_s,
            most_wait_s=plan.restart_most_s,
        )

    # ---- watching ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Keep the cluster running until a signal comes, or `stop`."""
        refuse_taken(self.plan.host, self.plan.port)
        previous = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for member in self.members:
                member.start()
            self._write_state()
            while not self._told.wait(TICK_S):
                self.tick(time.monotonic())
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.end()

    def stop(self) -> None:
        self._told.set()

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        self._told.set()

    def tick(self, now: float) -> None:
        """Start again what has died, and look at the rest from time to time."""
        changed = False
        for member in self.members:
            status = member.reap(now)
            if status is not None:
                changed = True
                self._withdraw(member)
                reason = f"signal {-status}" if status < 0 else f"status {status}"
                wait_s = member.start_at - now
                self._on_change(f"{member.name} ended with {reason} and is started again in {wait_s:.1f} s")
            elif member.process is None and now >= member.start_at:
                changed = True
                member.start()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            ready = [member.ready_since for member in self.members]
            with ThreadPoolExecutor(len(self.members)) as pool:
                list(pool.map(lambda member: member.look(now), self.members))
            for member, before in zip(self.members, ready, strict=True):
                if before is None and member.ready_since is not None:
                    changed = True
                    self._on_change(f"{member.name} serves")
        if changed:
            self._write_state()

    def _withdraw(self, member: Member) -> None:
        """Take a dead worker off the list of the front end, which would ask it until its lease has ended."""
        instance = member.instance
        if instance is None:
            return
        for folder in DISCOVERY_FOLDERS:
            for path in (self._discovery / "v1" / folder).glob(f"*%2F{instance}"):
                path.unlink(missing_ok=True)

    def _write_state(self) -> None:
        """Tell other programs what runs."""
        state = {
            "url": self.url,
            "members": [
                {
                    "name": member.name,
                    "role": member.role,
                    "pid": None if member.process is None else member.process.pid,
                    "state": member.state,
                    "url": member.url,
                    "restarts": member.restarts,
                    "log": str(member.log),
                }
                for member in self.members
            ],
        }
        temporary = self.directory / f"{STATE_FILE}.new"
        temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
        temporary.replace(self.directory / STATE_FILE)

    def end(self) -> None:
        """End the workers together, which take no more requests and finish those they have, then the front end, which
        would cut what still streams."""
        frontend, others = self.members[0], self.members[1:]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            # The workers' own limit, and a moment for what comes before and after it.
            list(pool.map(lambda member: member.end(self.plan.drain_s + DYNAMO_GRACE_S), others))
        frontend.end(FRONTEND_LIMIT_S)
        self._write_state()


def free_port() -> int:
    """Returns a free port that Dynamo's settings can hold, which are signed and have 16 bits."""
    for port in random.sample(SYSTEM_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise ConfigError(f"no free port was found between {SYSTEM_PORTS[0]} and {SYSTEM_PORTS[-1]}")


def refuse_taken(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as problem:
            raise ConfigError(f"cannot listen on {host}:{port}: {problem.strerror}; choose another --port") from None
