"""One process of a cluster, and how it is started, watched and started again."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROBE_LIMIT_S = 1.0
HEALTHY_S = 30.0
"""Time for which a process must have served before its next death is its first again."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
FIGURE = "outrider_worker_"


@dataclass
class Member:
    name: str
    role: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    url: str
    """Where the process says whether it serves; empty if it does not say."""
    state_file: Path | None = None
    first_wait_s: float = 0.5
    most_wait_s: float = 30.0
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    ready_since: float | None = None
    start_at: float = 0.0
    """When to start the process, if it does not run."""
    last_status: int | None = None
    figures: dict[str, float] = field(default_factory=dict)
    _waits: int = 0

    @property
    def state(self) -> str:
        if self.process is None:
            return "waits" if self.restarts or self.last_status is not None else "stopped"
        return "serves" if self.ready_since is not None else "starts"

    def start(self) -> None:
        self.ready_since = None
        if self.state_file is not None:
            self.state_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal is for the one that watches, which ends them in order.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def reap(self, now: float) -> int | None:
        """Returns the exit status of a process that has ended since, and plans its next start."""
        if self.process is None:
            return None
        status = self.process.poll()
        if status is None:
            return None
        if self.ready_since is not None and now - self.ready_since > HEALTHY_S:
            self._waits = 0
        wait_s = min(self.most_wait_s, self.first_wait_s * 2**self._waits)
        self._waits += 1
        self.restarts += 1
        self.start_at = now + wait_s
        self.process, self.ready_since, self.last_status = None, None, status
        self.figures = {}
        return status

    @property
    def instance(self) -> str | None:
        """The number by which the cluster knows this worker, in hexadecimal digits."""
        try:
            text = "" if self.state_file is None else self.state_file.read_text(encoding="ascii").strip()
        except OSError:
            return None
        return text or None

    def look(self, now: float) -> None:
        """Ask whether the process serves, and for its figures."""
        if self.process is None or not self.url:
            return
        healthy = fetch(f"{self.url}/health") is not None
        if healthy and self.ready_since is None:
            self.ready_since = now
        if healthy and self.state_file is not None:
            text = fetch(f"{self.url}/metrics")
            if text is not None:
                self.figures = figures_in(text)

    def end(self, limit_s: float) -> None:
        """Ask the process to end, and make it."""
        process = self.process
        if process is None:
            return
        deadline = time.monotonic() + limit_s
        process.terminate()
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
            process.wait()
        self.process = None


def _end_with_parent() -> None:
    """Have the system end this process when the one that watches it is gone, however that ended."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def fetch(url: str) -> str | None:
    """Returns a page, or None if it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_LIMIT_S) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError, ValueError):
        return None


def figures_in(text: str) -> dict[str, float]:
    """Returns a worker's own figures from its metrics."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(FIGURE):
            name, _space, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix(FIGURE).removesuffix("_total")] = float(value)
    return found
