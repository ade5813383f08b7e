"""A worker's handle of its store process: starts it, ends it when a call takes too long, and starts it again."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

from outrider.errors import ConfigError, TransferError
from outrider.transfer.tiers.store_child import INSTALL
from outrider.transfer.tiers.store_messages import (
    LARGEST_MESSAGE,
    FromProcess,
    Problem,
    Ready,
    Reply,
    SetUp,
    ToProcess,
    decode_from_process,
    encode,
)

logger = logging.getLogger("outrider.transfer")

START_LIMIT_S = 20.0
CLOSE_LIMIT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class StoreProcess:
    """Used by one thread at a time. The stage outlives the processes that map it."""

    def __init__(self, settings: SetUp) -> None:
        if find_spec("mooncake") is None:
            raise ConfigError(f"kv_store_config needs Mooncake, which is not installed: {INSTALL}")
        self.settings = settings
        self._memory_fd = os.memfd_create("outrider-store-stage")
        os.ftruncate(self._memory_fd, settings.stage_bytes)
        self.stage = mmap.mmap(self._memory_fd, settings.stage_bytes)
        self.stage_address = ctypes.addressof(ctypes.c_char.from_buffer(self.stage))
        self.is_ready = False
        self.problem = ""
        """Why the last process could not connect; empty if none has said."""
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._started_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._start_at_s = 0.0
        self.is_hopeless = False
        """Whether no further process is started: something must be installed first, or this one was closed."""

    def fileno(self) -> int:
        """Returns the descriptor on which the process answers; -1 while there is none."""
        return -1 if self._channel is None else self._channel.fileno()

    def tend(self, now_s: float) -> None:
        """Start a process, if there is none and it is time to, and end one that does not come up."""
        if self._process is None:
            if now_s >= self._start_at_s and not self.is_hopeless:
                self._start(now_s)
        elif not self.is_ready and now_s - self._started_s > START_LIMIT_S:
            master = self.settings.master_server_address
            self.problem = f"Mooncake's master at {master} did not answer within {START_LIMIT_S:g} s"
            self.end(now_s)

    @property
    def next_s(self) -> float | None:
        """When `tend` has something to do at the latest."""
        if self._process is None:
            return None if self.is_hopeless else self._start_at_s
        return None if self.is_ready else self._started_s + START_LIMIT_S

    def _start(self, now_s: float) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), self._memory_fd)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.transfer.tiers.store_child", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Mooncake writes lines for every failed call; what matters is logged here.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._channel, self._started_s = ours, now_s
        self.send(self.settings)

    def send(self, message: ToProcess) -> bool:
        """Send a message; False if there is no process to take it."""
        if self._channel is None:
            return False
        try:
            self._channel.send(encode(message))
        except OSError:
            return False
        return True

    def receive(self, now_s: float) -> list[Reply] | None:
        """Returns the replies that have come; None if the process is gone, and all open calls with it."""
        replies: list[Reply] = []
        while self._channel is not None:
            try:
                frame = self._channel.recv(LARGEST_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return replies
            except OSError:
                frame = b""
            if not frame:
                self.end(now_s)
                return None
            message: FromProcess = decode_from_process(frame)
            match message:
                case Reply():
                    replies.append(message)
                case Ready():
                    self.is_ready, self.problem, self._pause_s = True, "", FIRST_PAUSE_S
                    logger.info("connected to the store at %s", self.settings.master_server_address)
                case Problem():
                    self.problem, self.is_hopeless = message.reason, message.is_permanent
        return replies

    def end(self, now_s: float) -> None:
        """End the process, and with it every call that is open; another one is started after a pause."""
        was_ready, self.is_ready = self.is_ready, False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.restarts += 1
            reason = self.problem or ("the store process ended" if was_ready else "the store process did not come up")
            logger.warning("the KV store is away: %s", reason)
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def wait_ready(self, limit_s: float) -> None:
        """Wait until the process is connected; raises TransferError with the reason if it does not get there."""
        end_s = time.monotonic() + limit_s
        while not self.is_ready:
            now_s = time.monotonic()
            self.tend(now_s)
            gone = self.receive(now_s) is None
            if self.is_hopeless or (gone and self.problem) or now_s > end_s:
                silent = f"Mooncake's master at {self.settings.master_server_address} does not answer"
                raise TransferError(self.problem or silent)
            time.sleep(0.005)

    def close(self) -> None:
        """End the process for good. With a master that answers, the store is told that this worker's memory is gone."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_LIMIT_S if self.is_ready else 0.0)
            self._process.kill()
            self._process.wait()
            self._process = None
        self.is_ready, self.is_hopeless = False, True
        os.close(self._memory_fd)
