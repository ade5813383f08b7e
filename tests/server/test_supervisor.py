"""Starting the engine process again: after which pause, and with which model."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.server.test_tools import FACTS

from outrider.config import EngineConfig
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.server.front.supervisor import RESTART_WAITS_S, Supervisor
from outrider.server.messages import Ready


def supervisor() -> Supervisor:
    return Supervisor(EngineConfig(model="m"), timeout_s=1.0)


def test_an_engine_that_does_not_start_is_tried_after_longer_and_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    becomes_ready = [True, False, False, True, *[False] * 8]
    pauses: list[float] = []

    async def stopped_within(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) > len(becomes_ready)

    async def run_one(number: int) -> tuple[OutriderError, bool]:
        return ModelError("it has ended"), becomes_ready[number]

    async def run() -> None:
        watched = supervisor()
        watched.first_ready.set_result(FACTS)
        monkeypatch.setattr(watched, "_stopped_within", stopped_within)
        monkeypatch.setattr(watched, "_run_one", run_one)
        watched.start()
        assert watched._task is not None
        await watched._task
        await watched.stop()

    asyncio.run(run())
    first, second, third, *_, longest = RESTART_WAITS_S
    assert pauses[:7] == [first, first, second, third, first, second, third]
    assert pauses[-2:] == [longest, longest]
    assert pauses[4:-1] == sorted(pauses[4:-1])


def test_an_engine_that_comes_back_with_another_model_is_not_used() -> None:
    async def run() -> None:
        watched = supervisor()
        watched._take(Ready(facts=FACTS))
        assert watched.first_ready.result() is watched.facts
        watched._take(Ready(facts=msgspec.structs.replace(FACTS, device="cuda")))
        with pytest.raises(ConfigError, match="files have changed"):
            watched._take(Ready(facts=msgspec.structs.replace(FACTS, fingerprint="another")))
        await watched.stop()

    asyncio.run(run())
