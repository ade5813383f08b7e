"""Starts the engine process, passes messages, and starts another one if it dies or hangs.

starting ──Ready──▶ ready ──process ends──▶ starting (open requests fail)      any ──stop()──▶ stopped
    └──Broken at the very first start──▶ stopped, with the reason
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

import msgspec
import zmq

from outrider.config import EngineConfig
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.server.front.channel import Channel
from outrider.server.front.problems import Problem, engine_died, engine_hung, server_ends, unavailable
from outrider.server.front.streams import OpenRequests
from outrider.server.front.watchdog import Watchdog
from outrider.server.messages import (
    Accepted,
    Broken,
    CacheWasReset,
    Facts,
    Loading,
    LookAtPages,
    LookAtSpeculation,
    LookAtTransfers,
    Pages,
    Ping,
    Pong,
    Ready,
    Refused,
    ResetCache,
    Setup,
    Speculation,
    StepReport,
    Stop,
    ToEngine,
    ToFront,
    Transfers,
    decode_to_front,
    encode,
)

logger = logging.getLogger("outrider.server")

MODULE = "outrider.server.engine_process"
STOP_LIMIT_S = 5.0
LAST_MESSAGES_S = 0.2
RESTART_WAITS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits before each restart; the series starts over after an engine that became ready."""

Answer = CacheWasReset | Pages | Transfers | Speculation
"""What answers a call to the engine process."""


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class Supervisor:
    """Runs the engine process. Call `start`, then wait for `first_ready`; call `stop` at the end."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        timeout_s: float,
        on_report: Callable[[StepReport], None] = lambda report: None,
        on_end: Callable[[], None] = lambda: None,
        on_loading: Callable[[Loading], None] = lambda loading: None,
    ) -> None:
        self.state = State.STARTING
        self.facts: Facts | None = None
        self.requests = OpenRequests(self)
        self.pid: int | None = None
        self.loading: Loading | None = None
        self.unresponsive = False
        """Whether the engine process hung and no later one has made progress yet."""
        self.first_ready: asyncio.Future[Facts] = asyncio.get_running_loop().create_future()
        self._config = config
        self._watchdog = Watchdog(timeout_s)
        self._on_report = on_report
        self._on_end = on_end
        self._on_loading = on_loading
        # Only this user may enter it (mode 0700), so that no other user can send messages to the engine.
        self._directory = tempfile.mkdtemp(prefix="outrider-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: Channel | None = None
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._call_number = 0
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._told_to_stop = asyncio.Event()

    # ---- for the rest of the front end --------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    def send(self, message: ToEngine) -> None:
        if self.state is not State.READY:
            raise unavailable("the engine is not ready; try again in a moment")
        self._send(message)

    def _send(self, message: ToEngine) -> None:
        assert self._channel is not None
        self._channel.send(encode(message))

    async def reset_cache(self) -> None:
        await self._call(lambda call: ResetCache(call=call))

    async def pages(self) -> Pages:
        answer = await self._call(lambda call: LookAtPages(call=call))
        assert isinstance(answer, Pages)
        return answer

    async def transfers(self) -> Transfers:
        answer = await self._call(lambda call: LookAtTransfers(call=call))
        assert isinstance(answer, Transfers)
        return answer

    async def speculation(self) -> Speculation:
        answer = await self._call(lambda call: LookAtSpeculation(call=call))
        assert isinstance(answer, Speculation)
        return answer

    async def _call(self, order: Callable[[int], ToEngine]) -> Answer:
        self._call_number += 1
        call = self._call_number
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self.send(order(call))
            return await future
        finally:
            del self._calls[call]

    async def stop(self) -> None:
        """Ends the process; open requests fail."""
        was_ready, self.state = self.state is State.READY, State.STOPPED
        self._told_to_stop.set()
        if self._process is not None and self._process.returncode is None:
            if was_ready:
                self._send(Stop())
            else:
                self._process.kill()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_LIMIT_S)
            except TimeoutError:
                self._process.kill()
        if self._task is not None:
            await self._task
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    # ---- the engine processes -----------------------------------------------------------------------

    async def _supervise(self) -> None:
        failures = restarts = 0
        while not await self._stopped_within(RESTART_WAITS_S[min(failures, len(RESTART_WAITS_S) - 1)]):
            error, was_ready = await self._run_one(number=restarts)
            self._fail_all(server_ends() if self._is_stopped else engine_died())
            if self._is_stopped:
                break
            if not self.first_ready.done():
                self.state = State.STOPPED
                self.first_ready.set_exception(error)
                break
            failures = 0 if was_ready else failures + 1
            restarts += 1
            self._on_end()
            logger.error("the engine process has ended (%s); starting it again", error)

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._told_to_stop.wait(), seconds)
        return self._is_stopped

    @property
    def _is_stopped(self) -> bool:
        return self.state is State.STOPPED

    def _fail_all(self, problem: Problem) -> None:
        self.requests.fail_all(problem)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(problem)

    async def _run_one(self, number: int) -> tuple[OutriderError, bool]:
        """Runs one process until it ends. Returns the reason, and whether the process had been ready."""
        endpoint = f"ipc://{self._directory}/engine-{number}"
        channel = self._channel = Channel(self._context, endpoint, lambda frame: self._take(decode_to_front(frame)))
        setup = Setup(endpoint=endpoint, engine=self._config)
        # In a session of its own: Ctrl-C in a terminal is for the front end. The process ends when its input does.
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, stdin=PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        self.pid = process.pid
        if self._is_stopped:
            # `stop` was called while the process was being started, and did not know of it yet.
            process.kill()
        waiter = asyncio.create_task(process.wait())
        watcher = asyncio.create_task(self._watch())
        await asyncio.wait((channel.failed, waiter, watcher), return_when=asyncio.FIRST_COMPLETED)
        was_ready = self.state is State.READY
        if not self._is_stopped:
            self.state = State.STARTING
        hung = watcher.done() and not waiter.done()
        if hung:
            # Before the process has ended: killing it may take long if a device does not answer.
            self.unresponsive = True
            self._fail_all(engine_hung(self._watchdog.allowed_s))
        if hung or channel.failed.done():
            # Its messages cannot be read, or it cannot start, or it hangs.
            with suppress(ProcessLookupError):
                process.kill()
        else:
            # Its last messages may still be in the socket.
            await asyncio.wait((channel.failed,), timeout=LAST_MESSAGES_S)
        status = await waiter
        watcher.cancel()
        await asyncio.wait((watcher,))
        channel.close()
        problem = None if channel.failed.cancelled() else channel.failed.exception()
        if isinstance(problem, OutriderError):
            return problem, was_ready
        why = f": {problem!r}" if problem else f" after {self._watchdog.allowed_s:g} s without progress" if hung else ""
        return ModelError(f"the engine process ended {_exit_in_words(status)}{why}"), was_ready

    async def _watch(self) -> None:
        self._watchdog.begin()
        # The first start has no limit: the model may have to be downloaded, and the user sees its progress.
        await asyncio.wait((self.first_ready,))
        await self._watchdog.watch(lambda: self._send(Ping()))

    def _take(self, message: ToFront) -> None:
        match message:
            case StepReport():
                for delta in message.deltas:
                    self.requests.deliver(delta.request_id, delta)
                self._on_report(message)
            case Accepted() | Refused():
                self.requests.deliver(message.request_id, message)
            case CacheWasReset(call=call) | Pages(call=call) | Transfers(call=call) | Speculation(call=call):
                future = self._calls.get(call)
                if future is not None and not future.done():
                    future.set_result(message)
            case Pong():
                self._watchdog.answered(message)
            case Loading():
                self.unresponsive, self.loading = False, message
                self._watchdog.loaded_some()
                self._on_loading(message)
            case Ready(facts=facts):
                self._become_ready(facts)
            case Broken(kind=kind, message=text):
                raise (ModelError if kind == ModelError.__name__ else ConfigError)(text)

    def _become_ready(self, facts: Facts) -> None:
        if self.facts is not None and facts.fingerprint != self.facts.fingerprint:
            # The front end's tokenizer and limits belong to the model that it started with.
            raise ConfigError("the model's files have changed since the server started; start it again")
        self.facts, self.loading, self.unresponsive = facts, None, False
        self._watchdog.became_ready()
        if self.state is State.STOPPED:
            return
        self.state = State.READY
        if not self.first_ready.done():
            self.first_ready.set_result(facts)


def _exit_in_words(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with status {status}"
