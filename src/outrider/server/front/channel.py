"""The front end's end of the socket to the engine process, inside the event loop.

ZMQ's own asyncio support makes several futures for each message; here a message costs one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq

MESSAGES_AT_ONCE = 64
"""Then others get their turn."""


class Channel:
    """Calls `take` with each frame, in order, until it raises; then `failed` has what it raised."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, take: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._take = take
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._receive)

    def send(self, frame: bytes) -> None:
        # Without a limit on the queue it is sent at once, or not at all: then nobody is there, which shows elsewhere.
        with suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
        # The descriptor tells only of changes, and sending may have taken one in.
        self._loop.call_soon(self._receive)

    def close(self) -> None:
        if not self.failed.done():
            self.failed.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _receive(self) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            if self.failed.done():
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(frame)
            except Exception as problem:
                self.failed.set_exception(problem)
        self._loop.call_soon(self._receive)
