"""`outrider serve` or `outrider proxy` as a child process: start it, wait until it serves, look at its children, stop
it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.errors import ModelError
from outrider.tools.bench.process_memory import child_pids

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
SERVING_AT = re.compile(r"at (http://\S+)/v1")


class ServerProcess:
    """A server on a free port."""

    def __init__(
        self, options: Sequence[str], *, command: str = "serve", environment: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider", command, "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Wide enough that each message stays on one line.
            env={**os.environ, "COLUMNS": "1000", **(environment or {})},
        )
        self.lines: list[str] = []
        self.url = ""
        self._said = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = SERVING_AT.search(line)
            if found is not None:
                self.url = found[1]
                self._said.set()
        self._said.set()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> None:
        self._said.wait(START_LIMIT_S)
        if not self.url:
            self.stop()
            raise ModelError(f"the server did not start: {' '.join(self.lines[-3:]) or 'it printed nothing'}")

    def children(self, of: int | None = None) -> dict[str, list[int]]:
        """Ids of the server's child processes, or of another process's, by kind: engine_process, text_process."""
        found: dict[str, list[int]] = {}
        for pid in child_pids(self.process.pid if of is None else of):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except (OSError, ValueError):
                continue
            if "-m" in command:
                found.setdefault(command[command.index("-m") + 1].rpartition(".")[2], []).append(pid)
        return found

    @property
    def engine_pid(self) -> int:
        return self.children()["engine_process"][0]

    def stop(self) -> int:
        """Sends SIGTERM, as a service manager does; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Waits for something that another process does; returns whether it came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
