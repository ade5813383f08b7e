"""The front end's side of the text processes: who is idle, and what happens to one that takes too long."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from outrider.errors import NotNowError, RequestError
from outrider.frames import LENGTH_BYTES, length_of
from outrider.server.messages import Facts
from outrider.server.text_process.messages import (
    BadText,
    Encode,
    Render,
    TextAnswer,
    TextOrder,
    TextSetup,
    Tokens,
    decode_answer,
    framed,
)

ENDED = (asyncio.IncompleteReadError, ConnectionError)
"""What is seen of a process that has ended. A time-out is something else: what takes too long is not tried again."""
MODULE = "outrider.server.text_process"
MEMORY_BYTES_MAX = 4 << 30
"""Address space of one process; what a template builds beyond it is a MemoryError there."""


class TextPool:
    """Hand each order to a process that is idle; wait if none is."""

    def __init__(self, facts: Facts, *, processes: int, limit_s: float) -> None:
        self._setup = framed(
            TextSetup(
                tokenizer=facts.tokenizer,
                tokenizer_source=facts.tokenizer_source,
                bos_id=facts.bos_id,
                eos_ids=facts.eos_ids,
                templates=facts.templates,
                template_source=facts.template_source,
                template_variables=facts.template_variables,
                memory_bytes_max=MEMORY_BYTES_MAX,
            )
        )
        self._count = processes
        self._limit_s = limit_s
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        self._all: set[Process] = set()
        self._at_work: set[asyncio.Task[TextAnswer]] = set()
        self._closed = False
        self.interrupted = 0
        """How many orders took too long."""

    async def start(self) -> None:
        for process in await asyncio.gather(*(self._spawn() for _ in range(self._count))):
            self._idle.put_nowait(process)

    async def _spawn(self) -> Process:
        # A session of its own: Ctrl-C in a terminal is for the front end.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._all.add(process)
        assert process.stdin is not None
        process.stdin.write(self._setup)
        # The first answer shows that it has started, which takes longer than any order may.
        await self._ask(process, Encode(text="a", tokens_max=1))
        return process

    async def close(self) -> None:
        self._closed = True
        for process in list(self._all):
            await self._end(process)

    async def tokens(self, order: TextOrder) -> Tokens:
        """The tokens, or RequestError."""
        process = await self._idle.get()
        # A caller who leaves meanwhile does not stop it: a process must be done before it can serve another.
        task = asyncio.create_task(self._serve(process, order))
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)
        answer: TextAnswer = await asyncio.shield(task)
        if isinstance(answer, BadText):
            raise RequestError(answer.message)
        return answer

    async def _serve(self, process: Process | None, order: TextOrder) -> TextAnswer:
        answer: TextAnswer | None = None
        try:
            if process is not None:
                # One may have been ended by somebody else, such as the kernel where memory ran out: no fault of this
                # order's. Should it be after all, the same happens to the next.
                with suppress(*ENDED):
                    answer = await asyncio.wait_for(self._ask(process, order), self._limit_s)
                    return answer
                await self._end(process)
                process = None
                if self._closed:
                    return BadText(message="the server is ending")
            process = await self._replacement()
            answer = await asyncio.wait_for(self._ask(process, order), self._limit_s)
            return answer
        except TimeoutError:
            self.interrupted += 1
            what = "conversation" if isinstance(order, Render) else "prompt"
            return BadText(message=f"the {what} could not be turned into tokens within {self._limit_s:g} s; shorten it")
        except ENDED:
            return BadText(message="the text could not be turned into tokens: it took too much memory; shorten it")
        finally:
            if answer is None and process is not None:
                # It is still at it, or half an answer is in its pipe: the next order gets a fresh one.
                await self._end(process)
                process = None
            self._idle.put_nowait(process)

    async def _replacement(self) -> Process:
        try:
            return await self._spawn()
        except (*ENDED, OSError) as problem:
            raise NotNowError(f"no process for texts can be started ({problem}); try again in a moment") from None

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
