"""What the threads of a process are to a child that it forks, which has none of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.backends.cases import random
from tests.backends.cpu.test_program import in_use, is_left, left_by_a_step, set_word, word_of

from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.kernels.pool import THREADS, TICKET
from outrider.backends.cpu.kernels.threads import Threads
from outrider.models.parameters import Linear

LIMIT_S = 60


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    own = Threads(2)
    monkeypatch.setattr("outrider.backends.cpu.backend.shared_threads", lambda _count: own)
    yield own
    own.close()


def in_a_child(call: Callable[[], bool]) -> bool:
    """Runs a call in a forked child; returns whether it returned true before the limit."""
    child = os.fork()
    if not child:
        # A child that waits for a thread that it does not have waits forever.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        try:
            os._exit(0 if call() else 1)
        finally:
            sys.stderr.flush()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_computes_alone_and_takes_nothing_from_its_parent(threads: Threads) -> None:
    backend, linear = CPUBackend(), Linear(weight=random(1, 200, 64))
    inputs = [random(seed, 40, 64) for seed in range(20)]
    expected = [backend.project(x, linear) for x in inputs]
    ticket = word_of(threads, TICKET)

    def same() -> bool:
        return all(torch.equal(backend.project(x, linear), y) for x, y in zip(inputs, expected, strict=True))

    assert in_a_child(same)
    assert word_of(threads, TICKET) == ticket
    assert same()


def test_a_child_that_exits_leaves_its_parent_the_threads(threads: Threads) -> None:
    def close() -> bool:
        # As at the exit of every process.
        threads.close()
        return True

    assert in_a_child(close)
    assert word_of(threads, THREADS) == 2


def test_what_a_step_has_left_ends_in_the_child_and_in_the_parent(threads: Threads) -> None:
    backend = CPUBackend()
    for number in range(1, 30):
        feed = left_by_a_step(backend, float(number))
        assert is_left(backend)

        def ends(number: int = number) -> bool:
            backend.settle()
            return feed.written == float(number)  # noqa: B023

        assert in_a_child(ends)
        assert in_use(threads)
        assert ends()
        assert not in_use(threads)


def test_a_child_does_again_what_a_thread_was_at_work_on(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(1)
    monkeypatch.setattr("outrider.backends.cpu.backend.shared_threads", lambda _count: threads)
    # A thread that never runs, in whose place the test takes the job.
    set_word(threads, THREADS, 2)
    backend = CPUBackend()
    feed = left_by_a_step(backend, 1.0)
    posted = word_of(threads, TICKET)
    set_word(threads, TICKET, posted + 1)

    def ends() -> bool:
        backend.settle()
        return feed.written == 1.0

    assert in_a_child(ends)
    assert feed.written != 1.0
    set_word(threads, TICKET, posted)
    assert ends()
    threads.close()
