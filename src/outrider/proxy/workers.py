"""The workers behind a proxy: which of them serve, how busy each is, and what becomes of one that falls silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from enum import Enum

import msgspec

from outrider.proxy import bodies
from outrider.proxy.client import Answer, Call, UpstreamError, exchange
from outrider.proxy.config import ProxyConfig

logger = logging.getLogger("outrider.proxy")

KEY_NEEDED = (401, 403)
ROUTE_UNKNOWN = 404
LOOK_BYTES_MAX = 1 << 20


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


WRONG_ROLES = {Role.PREFILL: "kv_consumer", Role.DECODE: "kv_producer"}


class _Transfer(msgspec.Struct):
    """The field of interest of GET /kv_transfer."""

    role: str


class State(Enum):
    UNKNOWN = "has not answered yet"
    READY = "is ready"
    NOT_READY = "does not serve"
    LOST = "does not answer"


class Worker:
    def __init__(self, role: Role, url: str, *, connect_limit_s: float) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.state = State.UNKNOWN
        self.why = ""
        """The reason for the state, if it is not READY."""
        self.needs_key = False
        self.num_requests = 0
        """Number of open requests that this proxy has sent here."""
        self.failures = 0
        """Health checks in a row without an answer."""
        self._turns = 0
        self._connect_limit_s = connect_limit_s
        self._transports: set[asyncio.WriteTransport] = set()

    def __str__(self) -> str:
        return f"{self.role.value} worker {self.url}"

    @property
    def rank(self) -> tuple[int, int]:
        """Orders the workers that serve: the least busy first, and equally busy ones in turns."""
        return (self.num_requests, self._turns)

    @asynccontextmanager
    async def exchange(self, call: Call) -> AsyncIterator[Answer]:
        """Sends a request here. Raises UpstreamError if the worker does not answer, or is lost before the end."""
        self._turns += 1
        self.num_requests += 1
        try:
            async with exchange(
                self.url, call, connect_limit_s=self._connect_limit_s, transports=self._transports
            ) as answer:
                yield answer
        except UpstreamError as error:
            if not error.was_sent:
                self.become(State.LOST, str(error))
            raise
        finally:
            self.num_requests -= 1

    def become(self, state: State, why: str = "") -> None:
        before, self.state, self.why = self.state, state, why
        if state is State.READY:
            self.failures = 0
        if state is before:
            return
        if state is State.READY:
            logger.info("the %s is ready", self)
        else:
            logger.warning("the %s %s: %s", self, state.value, why)

    def cut_off(self) -> None:
        """End all open exchanges with an error: the worker is lost."""
        for transport in list(self._transports):
            transport.abort()

    # ---- health ------------------------------------------------------------------------------------

    async def look(self, config: ProxyConfig) -> None:
        """Asks the worker whether it serves, and notes the answer."""
        try:
            async with asyncio.timeout(config.health_limit_s):
                status, _body = await self._get("/ready", config)
                self.needs_key = status in KEY_NEEDED
                if self.needs_key or status == ROUTE_UNKNOWN:
                    # This route needs no key, and servers of other makes have it too.
                    status, _body = await self._get("/health", config)
                unfit = None
                if status == 200 and self.state is not State.READY:
                    unfit = self._unfit(*await self._get("/kv_transfer", config))
        except (UpstreamError, TimeoutError) as problem:
            why = str(problem) or f"no answer within {config.health_limit_s:g} s"
            self.failures += 1
            refuses = isinstance(problem, UpstreamError) and not problem.was_sent
            if refuses or self.failures >= config.health_failures_max:
                self.become(State.LOST, why)
            if self.failures >= config.health_failures_max:
                self.cut_off()
            return
        self.failures = 0
        if status != 200:
            self.become(State.NOT_READY, f"it answered {status} to the question whether it is ready")
        elif unfit is not None:
            self.become(State.NOT_READY, unfit)
        else:
            self.become(State.READY)

    def _unfit(self, status: int, body: bytes) -> str | None:
        """Returns why the worker cannot play its part, by what it says about itself; None if nothing is wrong."""
        if status == ROUTE_UNKNOWN and bodies.error_code(body) == "kv_transfer_not_configured":
            return "it exchanges no KV with other workers; start it with --kv-transfer-config and --cluster-key"
        try:
            role = msgspec.json.decode(body, type=_Transfer).role if status == 200 else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            role = None
        if role != WRONG_ROLES[self.role]:
            return None
        other = Role.DECODE if self.role is Role.PREFILL else Role.PREFILL
        return f"its kv_role is {role}; give its URL with --{other.value}"

    async def _get(self, target: str, config: ProxyConfig) -> tuple[int, bytes]:
        call = Call(method="GET", target=target)
        async with exchange(self.url, call, connect_limit_s=config.health_limit_s, transports=set()) as answer:
            return answer.status, await answer.body(LOOK_BYTES_MAX)


class Workers:
    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self.prefill = [Worker(Role.PREFILL, url, connect_limit_s=config.connect_limit_s) for url in config.prefill]
        self.decode = [Worker(Role.DECODE, url, connect_limit_s=config.connect_limit_s) for url in config.decode]

    @property
    def all(self) -> Sequence[Worker]:
        return (*self.prefill, *self.decode)

    def of(self, role: Role) -> Sequence[Worker]:
        return self.prefill if role is Role.PREFILL else self.decode

    def choose(self, role: Role, tried: Collection[Worker]) -> Worker | None:
        """Returns the least busy worker that serves and has not been tried; None if there is none."""
        ready = [worker for worker in self.of(role) if worker.state is State.READY and worker not in tried]
        return min(ready, key=lambda worker: worker.rank, default=None)

    async def watch(self) -> None:
        """Asks every worker whether it serves, again and again, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for worker in self.all:
                group.create_task(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        while True:
            await worker.look(self._config)
            await asyncio.sleep(self._config.health_interval_s)
