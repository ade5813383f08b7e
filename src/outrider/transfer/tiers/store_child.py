"""The store process: a client of Mooncake Store on behalf of one worker.

Mooncake runs in a process of its own, because some of its calls stop every thread of theirs for seconds when the
master is gone, and because a fault in it must not end a worker. It reads and writes only the stage, memory that the
worker has mapped too.

    python -m outrider.transfer.tiers.store_child SOCKET MEMORY        two descriptors that are inherited
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from outrider.transfer.tiers.store_messages import (
    LARGEST_MESSAGE,
    Ask,
    FromProcess,
    Get,
    Problem,
    Put,
    Ready,
    Remove,
    Reply,
    SetUp,
    decode_to_process,
    encode,
)

CLOSE_LIMIT_S = 5
UNKNOWN = -1
"""The code of a call that raised."""
INSTALL = "pip install 'outrider[store]'; it needs the system's libibverbs too (Debian: apt-get install libibverbs1)"


class StoreChild:
    def __init__(self, channel: socket.socket, memory_fd: int) -> None:
        self._channel = channel
        self._memory_fd = memory_fd
        self._sending = Lock()
        self._stage: mmap.mmap | None = None
        """Kept, or it would be unmapped."""
        self._base = 0
        self._store: Any = None
        self._replicas: Any = None
        # One thread for each kind of call, so that a question does not wait for a copy.
        self._asking, self._getting, self._putting = (ThreadPoolExecutor(1) for _ in range(3))

    def run(self) -> None:
        order = decode_to_process(self._channel.recv(LARGEST_MESSAGE))
        assert isinstance(order, SetUp)
        problem = self._set_up(order)
        self._send(Ready() if problem is None else problem)
        while problem is None:
            frame = self._channel.recv(LARGEST_MESSAGE)
            if not frame:
                # With the master gone this takes long, and stops every thread of the process.
                signal.alarm(CLOSE_LIMIT_S)
                self._store.close()
                return
            match decode_to_process(frame):
                case Ask() as ask:
                    self._asking.submit(self._answer, ask.number, len(ask.keys), self._exist, ask)
                case Get() as get:
                    self._getting.submit(self._answer, get.number, len(get.keys), self._get, get)
                case Put() as put:
                    self._putting.submit(self._answer, put.number, len(put.keys), self._put, put)
                case Remove() as remove:
                    self._getting.submit(self._remove, remove)
                case SetUp():
                    raise AssertionError("the store is set up already")

    def _set_up(self, order: SetUp) -> Problem | None:
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            return Problem(reason=f"Mooncake cannot be loaded ({error}); {INSTALL}", is_permanent=True)
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            order.local_hostname,
            order.metadata_server,
            order.global_segment_size,
            order.local_buffer_size,
            order.protocol,
            order.device_name,
            order.master_server_address,
        )
        if code:
            return Problem(
                reason=f"Mooncake did not connect to the master at {order.master_server_address} (code {code})",
                is_permanent=False,
            )
        self._stage = mmap.mmap(self._memory_fd, order.stage_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._stage))
        code = self._store.register_buffer(self._base, order.stage_bytes)
        if code:
            return Problem(reason=f"Mooncake did not register the stage (code {code})", is_permanent=False)
        self._replicas = ReplicateConfig()
        self._replicas.replica_num = order.replica_num
        return None

    def _send(self, message: FromProcess) -> None:
        with self._sending:
            self._channel.send(encode(message))

    def _answer(self, number: int, count: int, call: Callable[[Any], list[int]], order: Any) -> None:
        try:
            codes = list(call(order))
        except Exception:
            # Whatever it is, the worker takes it for a miss.
            codes = []
        self._send(Reply(number=number, codes=codes if len(codes) == count else [UNKNOWN] * count))

    def _exist(self, ask: Ask) -> list[int]:
        codes: list[int] = self._store.batch_is_exist(ask.keys)
        return codes

    def _get(self, get: Get) -> list[int]:
        addresses = [self._base + offset for offset in get.offsets]
        codes: list[int] = self._store.batch_get_into(get.keys, addresses, get.sizes)
        return codes

    def _put(self, put: Put) -> list[int]:
        codes: list[int] = list(self._store.batch_is_exist(put.keys))
        # A value that is there stays, so it need not be sent.
        missing = [place for place, code in enumerate(codes) if code == 0]
        if missing:
            stored = self._store.batch_put_from(
                [put.keys[place] for place in missing],
                [self._base + put.offsets[place] for place in missing],
                [put.sizes[place] for place in missing],
                self._replicas,
            )
            for place, code in zip(missing, stored, strict=True):
                codes[place] = code
        return [code if place in missing or code < 0 else 0 for place, code in enumerate(codes)]

    def _remove(self, remove: Remove) -> None:
        for key in remove.keys:
            self._store.remove(key, True)


def main(channel_fd: int, memory_fd: int) -> None:
    StoreChild(socket.socket(fileno=channel_fd), memory_fd).run()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    finally:
        # Threads that wait for a store that is gone must not keep the process.
        os._exit(0)
