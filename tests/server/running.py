"""`outrider serve` as a process, for tests that speak to it over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import openai

from outrider.tools.bench import server_process
from outrider.tools.bench.server_process import ServerProcess


class RunningServer(ServerProcess):
    def __init__(self, model: str | Path, *options: object, environment: Mapping[str, str] | None = None) -> None:
        super().__init__([str(model), *map(str, options)], environment=environment)

    def wait(self) -> RunningServer:
        """Until it serves."""
        self.wait_ready()
        return self

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def async_openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=240)


def wait_until(condition: Callable[[], bool]) -> None:
    assert server_process.wait_until(condition, 60.0), "it did not come to pass"
