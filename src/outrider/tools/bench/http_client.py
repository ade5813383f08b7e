"""An HTTP client for the server, from the standard library alone: light enough to measure with."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


class Client:
    """A client with one connection that is kept open."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        self._connection = HTTPConnection(where.hostname, where.port, timeout=TIMEOUT_S)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def close(self) -> None:
        self._connection.close()

    def send(self, method: str, path: str, body: bytes | None = None) -> HTTPResponse:
        try:
            self._connection.request(method, path, body, self._headers)
            return self._connection.getresponse()
        except TimeoutError:
            # The server may still be at work on the request, and must not get it twice.
            self._connection.close()
            raise
        except OSError:
            # A connection that was kept open may have been closed meanwhile.
            self._connection.close()
            self._connection.request(method, path, body, self._headers)
            return self._connection.getresponse()

    def get(self, path: str) -> tuple[int, str]:
        answer = self.send("GET", path)
        return answer.status, answer.read().decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        answer = self.send("POST", path, json.dumps(body).encode())
        text = answer.read()
        return answer.status, json.loads(text) if text else None

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        return Stream(self.send("POST", path, json.dumps({**body, "stream": True}).encode()))


class Stream:
    """An event stream. Closing the client's connection abandons it."""

    def __init__(self, answer: HTTPResponse) -> None:
        self._answer = answer
        self.status = answer.status
        self.first_s: float | None = None
        """Time at which the first event arrived."""
        self.complete = False
        """Whether the final event has arrived."""

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self._answer:
            if not line.startswith(b"data: "):
                continue
            if self.first_s is None:
                self.first_s = time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                self._answer.read()
                self.complete = True
                return
            yield json.loads(line[len(b"data: ") :])
