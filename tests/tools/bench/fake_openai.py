"""A server on 127.0.0.1 that speaks as much of OpenAI's API as the measurements need, and errs as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"
Events = Callable[[dict[str, Any]], list[bytes]]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def answer(body: dict[str, Any]) -> list[bytes]:
    """As many events with text as tokens were asked for, usage if it was asked for, and the end."""
    chat = "messages" in body
    events = [event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})] if chat else []
    for number in range(body["max_tokens"]):
        choice = {"delta": {"content": f"{number} "}} if chat else {"text": f"{number} "}
        events.append(event({"choices": [choice]}))
    if body.get("stream_options", {}).get("include_usage"):
        events.append(event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}))
    return [*events, DONE]


@dataclass
class FakeServer:
    """What the server does; tests change it while it runs."""

    url: str = ""
    events: Events = answer
    refused_fields: tuple[str, ...] = ()
    """Fields that are answered with status 400, as strict servers do."""
    status: int = 200
    models: Any = field(default_factory=lambda: {"data": [{"id": "fake"}]})
    models_status: int = 200
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Every request for text, in the order in which they came."""
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    before: Callable[[], None] = lambda: None
    """Runs before each answer."""


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                self._reply(401, {"error": {"message": "no key"}})
            else:
                self._reply(server.models_status, server.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.bodies.append(body)
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            server.before()
            with server.lock:
                server.at_once -= 1
            unknown = [name for name in server.refused_fields if name in body]
            if unknown:
                self._reply(400, {"error": {"message": f"unknown field {unknown[0]}"}})
            elif server.status != 200:
                self._reply(server.status, {"error": {"message": "not today"}})
            else:
                self._stream(server.events(body))

        def _stream(self, events: list[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for each in events:
                self.wfile.write(f"{len(each):x}\r\n".encode() + each + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def _reply(self, status: int, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            server.shutdown()
