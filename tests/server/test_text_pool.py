"""How many text processes are started, which of their failures are tried again, and what a client is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.server.facts import FACTS

from outrider.errors import NotNowError, RequestError
from outrider.server.text_process.messages import Encode, TextAnswer, Tokens
from outrider.server.text_process.pool import TextPool


class Scripted(TextPool):
    """Processes that do as told: `TimeoutError` stands for one that never answers."""

    def __init__(self, *does: Exception | None, starts: bool = True) -> None:
        super().__init__(FACTS.text, processes=1, limit_s=60)
        self._does = list(does)
        self._starts = starts
        self.started = 0
        self._idle.put_nowait(object())  # type: ignore[arg-type]

    async def _spawn(self) -> Any:
        if not self._starts:
            raise OSError("no memory for another")
        self.started += 1
        return object()

    async def _ask(self, process: Any, order: Any) -> TextAnswer:
        problem = self._does.pop(0)
        if problem is not None:
            raise problem
        return Tokens(count=1, token_ids=[7])

    async def _end(self, process: Any) -> None:
        pass


def tokens(pool: TextPool) -> list[int]:
    return asyncio.run(pool.tokens(Encode(text="a", tokens_max=9))).token_ids


def gone() -> Exception:
    return asyncio.IncompleteReadError(b"", 4)


def test_a_process_that_was_ended_is_replaced_once() -> None:
    pool = Scripted(gone(), None)
    assert tokens(pool) == [7]
    assert pool.started == 1
    with pytest.raises(RequestError, match="too much memory"):
        tokens(Scripted(gone(), BrokenPipeError()))


def test_what_takes_too_long_is_not_tried_again() -> None:
    pool = Scripted(TimeoutError())
    with pytest.raises(RequestError, match="within 60 s"):
        tokens(pool)
    assert (pool.started, pool.timeouts) == (0, 1)


def test_a_process_that_cannot_be_started_is_no_fault_of_the_text() -> None:
    with pytest.raises(NotNowError, match="no memory for another"):
        tokens(Scripted(gone(), starts=False))


class Counted(TextPool):
    """Processes that answer when they are told to."""

    def __init__(self, *, processes: int) -> None:
        super().__init__(FACTS.text, processes=processes, limit_s=60)
        self.started = 0
        self.answer = asyncio.Event()

    async def _spawn(self) -> Any:
        self.started += 1
        return object()

    async def _ask(self, process: Any, order: Any) -> TextAnswer:
        await self.answer.wait()
        return Tokens(count=1, token_ids=[7])


def test_processes_are_started_only_while_the_others_are_busy() -> None:
    async def orders() -> list[int]:
        pool = Counted(processes=3)
        await pool.start()
        started = [pool.started]
        pool.answer.set()
        for _ in range(4):
            await pool.tokens(Encode(text="a", tokens_max=9))
        started.append(pool.started)
        for concurrent in (2, 5):
            pool.answer.clear()
            tasks = [asyncio.create_task(pool.tokens(Encode(text="a", tokens_max=9))) for _ in range(concurrent)]
            await asyncio.sleep(0.01)
            pool.answer.set()
            assert [answer.token_ids for answer in await asyncio.gather(*tasks)] == [[7]] * concurrent
            started.append(pool.started)
        return started

    assert asyncio.run(orders()) == [1, 1, 2, 3]
