"""Compiled grammars of one engine: each is compiled once, off the thread that steps, and kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Protocol, TypeAlias

import torch

from outrider.errors import NotNowError, RequestError
from outrider.grammar import Grammar
from outrider.matching.matcher import Matcher
from outrider.matching.messages import Compile
from outrider.matching.native import native_tokens
from outrider.matching.process import shared_process
from outrider.matching.tokens import TokenTable

CompiledGrammar: TypeAlias = Any
"""Of the library, which has no types."""
COMPILE_LIMIT_S = 10.0
KEPT_MAX = 64
KEPT_BYTES_MAX = 256 << 20
WAITING_MAX = 64


class Compiler(Protocol):
    """Who compiles: a process of its own, but in tests."""

    def start(self, table: TokenTable) -> None: ...

    def compile(self, table: TokenTable, order: Compile, limit_s: float) -> str: ...


class Grammars:
    def __init__(
        self,
        table: TokenTable,
        *,
        device: torch.device,
        limit_s: float = COMPILE_LIMIT_S,
        compiler: Compiler | None = None,
    ) -> None:
        self._table = table
        self._device = device
        self._limit_s = limit_s
        self._compiler = shared_process() if compiler is None else compiler
        self._lock = Lock()
        self._kept: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        """The least recently wanted first; those that are still being compiled among them."""
        self._waiting = 0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-grammars")
        self._tokens: Any = None

    def prepare(self) -> None:
        """Load libraries and start the compiler now rather than with the first grammar."""
        self._worker.submit(self._start).result()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Have it compiled, unless it is; the future holds the result, or RequestError."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
                return found
            if self._waiting >= WAITING_MAX:
                raise NotNowError(f"{WAITING_MAX} other grammars wait to be compiled; try again in a moment")
            self._waiting += 1
            future = self._kept[grammar] = self._worker.submit(self._compile, grammar)
        future.add_done_callback(lambda done: self._note(grammar, done))
        return future

    def matcher(self, compiled: CompiledGrammar) -> Matcher:
        """One text's way through this grammar."""
        return Matcher.of(compiled, vocab_size=len(self._table.spelling), device=self._device)

    def _start(self) -> None:
        self._compiler.start(self._table)
        if self._tokens is None:
            self._tokens = native_tokens(self._table.spelling, self._table.eos_ids)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        import xgrammar

        self._start()
        text = self._compiler.compile(self._table, Compile(grammar=grammar), self._limit_s)
        compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._tokens)
        (start,) = self.matcher(compiled).masks([])
        if start is None or not start.any():
            raise RequestError(f"no text has the form of this {grammar.kind.value}; correct it")
        return compiled

    def _note(self, grammar: Grammar, done: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._waiting -= 1
            if done.cancelled() or done.exception() is not None:
                # Whoever asks again may have more luck: the machine may have been busy.
                self._kept.pop(grammar, None)
                return
            sizes = {
                each: future.result().memory_size_bytes
                for each, future in self._kept.items()
                if future.done() and not future.cancelled() and future.exception() is None
            }
            total = sum(sizes.values())
            for each, size in sizes.items():
                if each is grammar or (len(self._kept) <= KEPT_MAX and total <= KEPT_BYTES_MAX):
                    break
                del self._kept[each]
                total -= size
