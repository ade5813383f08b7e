"""The front end's side of the socket to the engine process, inside the event loop.

ZMQ's own asyncio support creates several futures for each message; here a message costs one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq

MESSAGES_AT_ONCE = 64
"""Messages that are received before other tasks of the event loop run."""


class Channel:
    """Calls `take` with each frame, in order, until it raises; `failed` then holds the exception."""

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
        # The queue is unlimited, so this fails only if the engine process is gone, which the supervisor notices.
        with suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
        # The descriptor is edge-triggered, and sending may have consumed an edge.
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
