"""Workers in processes of their own, as tests handle them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.stopping import stop

from outrider.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[3]
START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 20.0


class WorkerProcess:
    """`worker.py` as a process. It starts while the test goes on; `endpoint` waits for it."""

    def __init__(self, role: str, directory: Path, *, namespace: str | None = None, **settings: Any) -> None:
        given: dict[str, Any] = {"drafter": "none", "windows": "full", "role": role, "directory": str(directory)}
        given |= settings
        given["transfer"] = {"kv_connector": "nixl"} | settings.get("transfer", {})
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        prefix = [] if namespace is None else ["ip", "netns", "exec", namespace]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._pending = b""
        self._endpoint: str | None = None

    @property
    def endpoint(self) -> str:
        if self._endpoint is None:
            self._endpoint = self.read(START_LIMIT_S)["endpoint"]
        return self._endpoint

    def read(self, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """Returns the next line that the worker prints."""
        assert self.process.stdout is not None
        end_s = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"the worker says nothing for {limit_s} s"
            if select.select([self.process.stdout], [], [], left_s)[0]:
                arrived = os.read(self.process.stdout.fileno(), 1 << 20)
                assert arrived, "the worker has ended"
                self._pending += arrived
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def tell(self, do: str, **command: Any) -> None:
        assert self.process.stdin is not None
        assert self.endpoint
        self.process.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        self.tell(do, **command)
        return self.read()

    def start(self, name: str, prompt: Sequence[int], params: SamplingParams, **more: Any) -> None:
        given = {key: value for key, value in asdict(params).items() if value != getattr(SamplingParams(), key)}
        self.tell("run", name=name, prompt=list(prompt), params=given, **more)

    def run(self, name: str, prompt: Sequence[int], params: SamplingParams, **more: Any) -> dict[str, Any]:
        self.start(name, prompt, params, **more)
        return self.read()

    def until_idle(self, limit_s: float) -> dict[str, Any]:
        end_s = time.monotonic() + limit_s
        while True:
            state = self.ask("state")
            if state["idle"] and not state["live"]:
                return state
            assert time.monotonic() < end_s, f"the worker still holds something: {state}"
            time.sleep(0.02)

    # --- what befalls it ------------------------------------------------------------------------------

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        stop(self.process)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
