"""The front end's side of the text processes: which are idle, and what happens to one that takes too long."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from outrider.errors import NotNowError, RequestError
from outrider.frames import LENGTH_BYTES, length_of
from outrider.server.messages import TextFacts
from outrider.server.text_process.messages import (
    BadText,
    Encode,
    Render,
    TextAnswer,
    TextOrder,
    Tokens,
    decode_answer,
    framed,
)

ENDED = (asyncio.IncompleteReadError, ConnectionError)
"""Errors that show that a process has ended. A timeout is not one of them: an order that takes too long is not
retried."""
MODULE = "outrider.server.text_process"


class TextPool:
    """Hands each order to an idle process, starts another if all are busy, and waits once there are enough of them."""

    def __init__(self, facts: TextFacts, *, processes: int, limit_s: float) -> None:
        self._setup = framed(facts)
        self._count = processes
        self._limit_s = limit_s
        # The process that was used last is used next, so that those at the bottom, which are None until there is work
        # for them, are started only when the others are busy.
        self._idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._all: set[Process] = set()
        self._running: set[asyncio.Task[TextAnswer]] = set()
        self._closed = False
        self.timeouts = 0
        """Number of orders that took too long."""

    async def start(self) -> None:
        for _ in range(self._count - 1):
            self._idle.put_nowait(None)
        self._idle.put_nowait(await self._spawn())

    async def _spawn(self) -> Process:
        # In a session of its own, since Ctrl-C in a terminal is for the front end.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._all.add(process)
        assert process.stdin is not None
        process.stdin.write(self._setup)
        # Wait for a first answer, since starting takes longer than any order may.
        await self._ask(process, Encode(text="a", tokens_max=1))
        return process

    async def close(self) -> None:
        self._closed = True
        for process in list(self._all):
            await self._end(process)

    async def tokens(self, order: TextOrder) -> Tokens:
        """Returns the tokens of the order; raises RequestError if it cannot be carried out."""
        process = await self._idle.get()
        # A caller that is cancelled does not cancel the order: a process must finish it before it can take another.
        task = asyncio.create_task(self._serve(process, order))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        answer: TextAnswer = await asyncio.shield(task)
        if isinstance(answer, BadText):
            raise RequestError(answer.message)
        return answer

    async def _serve(self, process: Process | None, order: TextOrder) -> TextAnswer:
        answer: TextAnswer | None = None
        try:
            if process is not None:
                # The process may have been killed before, for example by the kernel when memory ran out. If the order
                # itself is the cause, the replacement ends too.
                with suppress(*ENDED):
                    answer = await asyncio.wait_for(self._ask(process, order), self._limit_s)
                    return answer
                await self._end(process)
                process = None
                if self._closed:
                    return BadText(message="the server is shutting down")
            process = await self._replacement()
            answer = await asyncio.wait_for(self._ask(process, order), self._limit_s)
            return answer
        except TimeoutError:
            self.timeouts += 1
            what = "conversation" if isinstance(order, Render) else "prompt"
            return BadText(message=f"the {what} could not be turned into tokens within {self._limit_s:g} s; shorten it")
        except ENDED:
            return BadText(message="the text could not be turned into tokens: it took too much memory; shorten it")
        finally:
            if answer is None and process is not None:
                # The process is still busy, or half an answer is in its pipe; the next order gets a new process.
                await self._end(process)
                process = None
            self._idle.put_nowait(process)

    async def _replacement(self) -> Process:
        try:
            return await self._spawn()
        except (*ENDED, OSError) as problem:
            raise NotNowError(f"no text process can be started ({problem}); try again in a moment") from None

    async def _ask(self, process: Process, order: TextOrder) -> TextAnswer:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(framed(order))
        await process.stdin.drain()
        length = length_of(await process.stdout.readexactly(LENGTH_BYTES))
        answer: TextAnswer = decode_answer(await process.stdout.readexactly(length))
        return answer

    async def _end(self, process: Process) -> None:
        self._all.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
