"""The order in which recorded programs run: at once, together with the next one, or while the engine prepares its next
step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.cpu.kernels.pool import ENTER, SETTLE
from outrider.backends.cpu.kernels.threads import Threads
from outrider.backends.cpu.program import Job, Program, Replay

Result = TypeVar("Result")


class Replays:
    """The programs of a backend that have yet to run or to end: at most one of each.

    enqueue     the program runs in one call with the next one, which wakes the threads only once
    begin       what is still enqueued is left to a thread of the pool; `settle` waits for its end
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.enqueued: Replay | None = None
        self.begun: Replay | None = None
        """The program that a thread of the pool may be running, with the memory that it uses."""
        self._job = Job()

    def run(self, program: Program[Result], x: Tensor, groups: Sequence[AttentionMetadata]) -> Result:
        """Runs a program, after the enqueued one if there is any."""
        self.settle()
        first, self.enqueued = self.enqueued, None
        return program.run(x, groups, after=first)

    def enqueue(self, program: Program[Any], x: Tensor, groups: Sequence[AttentionMetadata]) -> None:
        self.flush()
        self.enqueued = Replay(program, x, groups)

    def flush(self) -> None:
        """Ends the program that has begun, and runs the enqueued one."""
        self.settle()
        if self.enqueued is not None:
            (program, x, groups), self.enqueued = self.enqueued, None
            program.run(x, groups)

    def begin(self) -> None:
        """Leaves the enqueued program to the first thread that has nothing else to do."""
        self.settle()
        if self.enqueued is not None:
            self.begun, self.enqueued = self.enqueued, None
            self.begun.program.begin(self.begun.x, self.begun.groups, self._job)

    def settle(self) -> None:
        """Returns when the program that has begun has ended, if there is any."""
        if self.begun is not None:
            ENTER.call(self._threads.address, self._job.address, SETTLE, 0)
            self.begun = None

    def __del__(self) -> None:
        # Not before that is the memory free that the program uses.
        self.settle()
