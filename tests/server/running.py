"""`outrider serve` as a process, for tests that speak to it over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai

START_LIMIT_S = 240.0
SERVING_AT = re.compile(r"at (http://\S+)/v1")


class RunningServer:
    def __init__(self, model: str | Path, *options: object, environment: Mapping[str, str] | None = None) -> None:
        script = Path(sys.executable).with_name("outrider")
        command = [str(script), "serve", str(model), "--port", "0", *map(str, options)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "300", **(environment or {})},
        )
        self.lines: list[str] = []
        self._said = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = SERVING_AT.search(line)
            if found is not None:
                self.url = found[1]
                self._said.set()
        self._said.set()

    def wait(self) -> RunningServer:
        """Until it serves."""
        assert self._said.wait(START_LIMIT_S), self.log
        assert self.url, self.log
        return self

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def async_openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=240)

    def children(self) -> dict[str, list[int]]:
        """Process ids by what they are: the module's last name."""
        found: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            try:
                parent = re.search(r"^PPid:\s+(\d+)", (entry / "status").read_text(), re.MULTILINE)
                command = (entry / "cmdline").read_bytes().decode().split("\0")
            except (OSError, ValueError):
                continue
            if parent is not None and int(parent[1]) == self.process.pid and "-m" in command:
                found.setdefault(command[command.index("-m") + 1].split(".")[-1], []).append(int(entry.name))
        return found

    @property
    def engine_pid(self) -> int:
        return self.children()["engine_process"][0]

    def stop(self) -> int:
        """SIGTERM, as a service manager does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()


def wait_until(condition: Any, limit_s: float = 60.0) -> None:
    """For what happens soon, but in another process."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
