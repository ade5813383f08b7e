"""Workers for tests of the nixl link: a prefill worker in a process of its own, and a reading link in this one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.stopping import stop
from tests.transfer.links.worlds import DIGEST, KEY, Pages

from outrider.transfer.link import Event, Received
from outrider.transfer.links.nixl import NixlLink
from outrider.transfer.messages import Hello, Welcome
from outrider.transfer.tickets import ClusterKey

ROOT = Path(__file__).resolve().parents[3]


class Prefiller:
    """`serve.py` as a process."""

    def __init__(
        self,
        *,
        layout: str = "small",
        page_tokens: int = 16,
        seed: int = 1,
        port: int = 0,
        engine: str = "prefill",
        key: str = KEY,
    ) -> None:
        given = dict(layout=layout, page_tokens=page_tokens, seed=seed, port=port, engine=engine, key=key)
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("serve.py")), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the prefill worker did not start"
        self.endpoint: str = json.loads(line)["endpoint"]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        stop(self.process)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "Prefiller":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def reader(pages: Pages, **options: Any) -> Iterator[NixlLink]:
    """Yields a link that reads into these pages and serves nothing."""
    settings = dict(host="127.0.0.1", port=0, engine="decode", transport="auto") | options
    link = NixlLink(pages.memory, None, ClusterKey(settings.pop("key", KEY)), **settings)
    try:
        yield link
    finally:
        link.close()


def collect(link: NixlLink, number: int, limit_s: float = 5.0) -> list[Event]:
    """Returns the next events, at least this many unless the time is up."""
    events: list[Event] = []
    end_s = time.monotonic() + limit_s
    while len(events) < number and time.monotonic() < end_s:
        link.wait(end_s - time.monotonic())
        events += link.poll()
    return events


def introduced(link: NixlLink, endpoint: str) -> bytes:
    """Returns the introduction that a worker answers to a greeting."""
    link.send(endpoint, Hello(digest=DIGEST, reader="decode"))
    (event,) = collect(link, 1)
    assert isinstance(event, Received)
    assert event.peer == endpoint
    assert isinstance(event.message, Welcome)
    return event.message.introduction


def greet(link: NixlLink, endpoint: str) -> None:
    """Meet a worker."""
    link.meet(endpoint, introduced(link, endpoint))
