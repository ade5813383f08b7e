"""A stand-in for prefill workers, so that losing the last of them is no outage: `outrider worker --role stand-in`.

With prefill and decode apart, Dynamo's front end serves nothing while no prefill worker is registered, although decode
workers can compute prompts too. The stand-in registers as one while there is none, has no engine, and passes each
request on without KV, so that the decode worker computes its prompt. It goes when a prefill worker is back.

    watch (this process)  ── none is left ──▶ tells StandIn (a child that is loaded already) to register
                          ◀─ another one is back: ends it, and loads the next one
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run as run_worker
from dynamo.common.constants import DisaggregationMode
from dynamo.runtime import DistributedRuntime

from outrider.cluster.environment import setting

logger = logging.getLogger("outrider.worker")

LOOK_S = 0.2
LOOKS_BESIDE = 15
"""How long the stand-in stays beside a prefill worker that is back, so that the front end has noticed it."""
STOP_LIMIT_S = 10.0
CHILD = "OUTRIDER_STAND_IN_REGISTERS"
"""Environment variable that tells the child from the watching process."""


class StandIn(LLMEngine):  # type: ignore[misc]
    """A prefill worker that computes nothing."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError("stand-ins are made by `stand_in`")

    async def start(self, worker_id: int) -> Registration:
        # Everything is loaded: what is left takes milliseconds once the line comes.
        if not await asyncio.to_thread(sys.stdin.readline):
            os._exit(0)
        return self._registration

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        prompt = len(request["token_ids"])
        yield {
            "token_ids": [],
            "index": 0,
            "finish_reason": "length",
            "disaggregated_params": {},
            "completion_usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
        }

    async def is_quiescent(self) -> bool:
        return True

    async def cleanup(self) -> None:
        return


def stand_in(*, files: str, served_model: str, namespace: str, context_tokens: int, block_tokens: int) -> None:
    """Watch the prefill workers of a cluster, and stand in for them while there are none, until SIGTERM."""
    if os.environ.get(CHILD):
        registration = Registration(
            model=files,
            served_model_name=served_model,
            llm=LlmRegistration(context_length=context_tokens, kv_cache_block_size=block_tokens),
        )
        config = WorkerConfig(
            namespace=namespace,
            component="prefill",
            model_name=files,
            served_model_name=served_model,
            discovery_backend=setting("DYN_DISCOVERY_BACKEND", "etcd"),
            request_plane=setting("DYN_REQUEST_PLANE", "tcp"),
            event_plane=setting("DYN_EVENT_PLANE", "zmq"),
            disaggregation_mode=DisaggregationMode.PREFILL,
            enable_kv_routing=False,
        )

        async def made(_argv: list[str] | None) -> tuple[StandIn, WorkerConfig]:
            return StandIn(registration), config

        run_worker(StandIn, [], made)
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(namespace))


async def _watch(namespace: str) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    runtime = DistributedRuntime(loop, setting("DYN_DISCOVERY_BACKEND", "etcd"), setting("DYN_REQUEST_PLANE", "tcp"))
    client = await runtime.endpoint(f"{namespace}.prefill.generate").client()
    child, leaving = Child(), None
    looks_alone = looks_beside = 0
    """Numbers of looks in a row that found no worker, and one beside the stand-in."""
    try:
        while not told.is_set():
            if leaving is not None and leaving.has_ended:
                leaving = None
            if child.has_ended:
                logger.warning("the stand-in ended by itself; loading another one")
                child = Child()
            workers = len(client.instance_ids())
            looks_alone = looks_alone + 1 if workers == 0 else 0
            looks_beside = looks_beside + 1 if workers > 1 and child.is_registered else 0
            if looks_alone > 1 and not child.is_registered and leaving is None:
                logger.warning("no prefill worker is left: decode workers compute the prompts")
                child.register()
            elif looks_beside > LOOKS_BESIDE:
                logger.info("a prefill worker is back")
                child.process.terminate()
                leaving, child = child, Child()
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), LOOK_S)
    finally:
        for each in (child, leaving):
            if each is not None:
                each.end()
        runtime.shutdown()


class Child:
    """A process that can register as a prefill worker at once."""

    def __init__(self) -> None:
        self.is_registered = False
        self.process = subprocess.Popen(_command(), env=os.environ | {CHILD: "1"}, stdin=subprocess.PIPE)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def register(self) -> None:
        assert self.process.stdin is not None
        self.is_registered = True
        with suppress(OSError):
            self.process.stdin.write(b"register\n")
            self.process.stdin.flush()

    def end(self) -> None:
        if not self.is_registered:
            self.process.kill()  # it waits for its line, and has nothing to end in order
        self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _command() -> list[str]:
    """Returns the command that started this process."""
    return [sys.executable, "-m", "outrider", *sys.argv[1:]]
