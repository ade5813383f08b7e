"""A cluster as a child process, and what its members do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cluster.members import fetch, figures_in
from outrider.errors import OutriderError

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0


class ClusterError(OutriderError):
    """The cluster did not come up, or did not end."""


class ClusterProcess:
    """`outrider cluster` with a plan, in a directory of its own."""

    def __init__(self, plan: Mapping[str, Any], directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "plan.yaml"
        path.write_text(json.dumps(plan), encoding="utf-8")  # YAML contains JSON
        self._log = (directory / "cluster.log").open("wb")
        command = [sys.executable, "-m", "outrider", "cluster", str(path), "--directory", str(directory / "run")]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.directory / "run" / "cluster.json").read_text(encoding="utf-8"))
        except OSError:
            return {"url": "", "members": []}
        return found

    @property
    def url(self) -> str:
        return str(self.state["url"])

    def members(self, *roles: str) -> list[dict[str, Any]]:
        return [member for member in self.state["members"] if member["role"] in roles]

    @property
    def workers(self) -> list[dict[str, Any]]:
        return self.members("agg", "prefill", "decode")

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until every worker serves, and the front end takes requests."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            workers = self.workers
            if workers and all(worker["state"] == "serves" for worker in workers) and self._takes_requests():
                return
            time.sleep(0.3)
        raise ClusterError(f"the cluster does not serve; its logs are in {self.directory}")

    def _takes_requests(self) -> bool:
        from outrider.tools.fleet.client import ask

        text = fetch(f"{self.url}/v1/models")
        if text is None or not json.loads(text).get("data"):
            return False
        return ask(self.url, [{"role": "user", "content": "Hello"}], max_tokens=1).error is None

    def kill(self, name: str) -> bool:
        """Kill a member; returns whether it was running."""
        pid = next((member["pid"] for member in self.state["members"] if member["name"] == name), None)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def log_of_requests(self) -> list[dict[str, Any]]:
        """Returns what the workers noted of requests, in the order of time."""
        path = self.directory / "run" / "requests.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        return sorted(map(json.loads, lines), key=lambda entry: entry["time"])

    def busy_with(self, role: str) -> dict[str, str]:
        """Returns the requests that workers of a role have begun and not ended, with their workers."""
        found: dict[str, str] = {}
        for entry in self.log_of_requests():
            if entry["role"] != role:
                continue
            if entry["event"] == "start":
                found[entry["request"]] = entry["worker"]
            else:
                found.pop(entry["request"], None)
        return found

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns the figures of each worker that serves."""
        found = {}
        for worker in self.workers:
            text = fetch(f"{worker['url']}/metrics") if worker["url"] else None
            if text is not None:
                found[worker["name"]] = figures_in(text)
        return found

    def stop(self) -> int:
        """End the cluster in order; returns its status."""
        self._process.terminate()
        try:
            status = self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise ClusterError("the cluster did not end in time") from None
        finally:
            self._log.close()
        return status
