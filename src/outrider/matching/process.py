"""The engine's side of the process that compiles grammars: one order at a time, and an end to one that takes too long.

Compiling is native code that nothing interrupts, and some grammars of a few hundred bytes take minutes and gigabytes.
A process can be ended whatever it does; a thread cannot.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock

import msgspec

from outrider.errors import NotNowError, RequestError
from outrider.frames import LENGTH_BYTES, length_of
from outrider.matching.messages import BadGrammar, Compile, Done, UseTokens, decode_answer, framed
from outrider.matching.tokens import TokenTable

MODULE = "outrider.matching"
START_LIMIT_S = 120.0
COMPILED_BYTES_MAX = 64 << 20


class CompilerProcess:
    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._table: TokenTable | None = None
        # The kernel ends the process with the thread that started it, so that must be one that stays.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-compiler")

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, table: TokenTable) -> None:
        """Have it running and ready for grammars over these tokens."""
        with self._lock:
            self._prepare(table)

    def compile(self, table: TokenTable, order: Compile, limit_s: float) -> str:
        """The compiled grammar, or RequestError. Whoever else wants one waits meanwhile."""
        kind = order.grammar.kind.value
        with self._lock:
            try:
                try:
                    answer = self._compile(table, order, limit_s)
                except BrokenPipeError:
                    # It may have died of something else just before; who kills two is to blame.
                    answer = self._compile(table, order, limit_s)
            except TimeoutError:
                raise RequestError(f"the {kind} took longer than {limit_s:g} s to compile; make it simpler") from None
            except OSError:
                raise RequestError(f"the {kind} took too much memory to compile; make it simpler") from None
        if isinstance(answer, BadGrammar):
            raise RequestError(answer.message)
        if len(answer.compiled) > COMPILED_BYTES_MAX:
            raise RequestError(f"the {kind} is too large once it is compiled; make it simpler")
        return answer.compiled

    def _compile(self, table: TokenTable, order: Compile, limit_s: float) -> Done | BadGrammar:
        self._prepare(table)
        try:
            return self._ask(order, limit_s)
        except OSError:
            self._end()
            raise

    def _prepare(self, table: TokenTable) -> None:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._starter.submit(_started).result()
        if self._table is not table:
            try:
                self._ask(UseTokens(spelling=table.spelling, eos_ids=table.eos_ids), START_LIMIT_S)
            except OSError as problem:
                self._end()
                raise NotNowError(
                    f"the process that compiles grammars does not start ({problem or 'it takes too long'}); see its "
                    "messages above, and check that xgrammar is installed with all it needs"
                ) from None
            self._table = table

    def _ask(self, order: msgspec.Struct, limit_s: float) -> Done | BadGrammar:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        deadline_s = time.monotonic() + limit_s
        _write(process.stdin.fileno(), framed(order), deadline_s)
        length = length_of(_read(process.stdout.fileno(), LENGTH_BYTES, deadline_s))
        return decode_answer(_read(process.stdout.fileno(), length, deadline_s))

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process = self._table = None


def _started() -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in a terminal is not for it.
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    # A process that takes nothing more must not hold up whoever writes to it for longer than a compilation may take.
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _write(pipe: int, message: bytes, deadline_s: float) -> None:
    rest = memoryview(message)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_WRITE)
        while rest:
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError
            rest = rest[os.write(pipe, rest) :]


def _read(pipe: int, count: int, deadline_s: float) -> bytes:
    read = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(read) < count:
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError
            chunk = os.read(pipe, min(count - len(read), 1 << 20))
            if not chunk:
                raise BrokenPipeError("it has ended")
            read += chunk
    return bytes(read)


@cache
def shared_process() -> CompilerProcess:
    """One serves all engines of a process. It starts with the first grammar."""
    return CompilerProcess()
