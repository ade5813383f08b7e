"""Passes that are recorded at their first run with a number of rows and replayed from then on, and steps around
them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.base import Body, Options, Pass, Result
from outrider.backends.cpu.program import RECORDED_ROWS_MAX, Program, SharedBuffers
from outrider.backends.torch_threads import torch_threads

if TYPE_CHECKING:
    from outrider.backends.cpu.backend import CPUBackend

PROGRAMS_MAX = 128
"""The most programs of a pass that are kept: the rows and options of prompts' last chunks vary without end."""


class RecordedPass(Pass[Options, Result]):
    def __init__(self, backend: CPUBackend, body: Body[Options, Result]) -> None:
        self._backend = backend
        self._body = body
        self._buffers = SharedBuffers()
        self._programs: dict[tuple[int, Options], Program[Result]] = {}
        """Recorded programs by number of rows and options. Those used last come last."""

    def run(self, x: Tensor, groups: tuple[AttentionMetadata, ...], options: Options) -> Result:
        if x.shape[0] > RECORDED_ROWS_MAX:
            return self._body(x, groups, options)
        return self._backend.replays.run(self._program(x, groups, options), x, groups)

    def enqueue(self, x: Tensor, groups: tuple[AttentionMetadata, ...], options: Options) -> None:
        if x.shape[0] > RECORDED_ROWS_MAX:
            self._body(x, groups, options)
        else:
            self._backend.replays.enqueue(self._program(x, groups, options), x, groups)

    def _program(self, x: Tensor, groups: tuple[AttentionMetadata, ...], options: Options) -> Program[Result]:
        key = (x.shape[0], options)
        program = self._programs.pop(key, None)
        if program is None:
            program = self._backend.record(x, groups, self._buffers, lambda given: self._body(given, groups, options))
            if len(self._programs) >= PROGRAMS_MAX:
                del self._programs[next(iter(self._programs))]
        self._programs[key] = program
        return program


class Step(AbstractContextManager[None]):
    """One step of the engine. PyTorch gets a single thread, and a pass that is still enqueued begins when the step
    ends."""

    def __init__(self, backend: CPUBackend) -> None:
        self._backend = backend
        self._threads = torch_threads(1)

    def __enter__(self) -> None:
        self._backend.settle()
        self._backend.discard()
        self._threads.__enter__()

    def __exit__(self, error: object, *_more: object) -> None:
        try:
            if error is None:
                self._backend.replays.begin()
        finally:
            self._backend.discard()
            self._threads.__exit__()
