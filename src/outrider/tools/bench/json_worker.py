"""A worker process of a benchmark that answers requests, both as lines of JSON."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def program_path(module: str) -> str:
    """Returns the file of a module, for interpreters and checkouts that do not have the module itself."""
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return found.origin


class JsonWorker:
    def __init__(
        self,
        command: Sequence[str],
        *,
        failed: Callable[[str], Exception],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """`failed` makes the error that is raised if the process ends, from the text of its log."""
        self._failed = failed
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its log says why; reading its answer reports that
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Returns the next line that the process writes; its first one says that it is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise self._failed(self._log.read())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
