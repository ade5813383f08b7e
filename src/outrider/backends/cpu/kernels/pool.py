"""The thread pool that runs a job's chunks, and the one compiled function through which everything is called.

The calling thread works too. Chunks are taken one at a time from a counter, so a thread that is descheduled or still
asleep delays no other: the others take its chunks. A thread without work spins for some tens of microseconds, the usual
gap between two calls, and then sleeps in the operating system, so an idle pool uses no core.

A whole program may also be left to a thread of the pool while the caller goes on with something else, and is waited
for later: BEGIN and SETTLE.

The counter and the number of the job share one word. A late thread claims a chunk only by a compare-and-swap of that
word against what it read before it read the job, so it can neither claim a chunk of a job that is over nor mix two jobs
up.
"""

from __future__ import annotations

from numba import njit

from outrider.backends.cpu.kernels.attention import plan_attend, plan_merge
from outrider.backends.cpu.kernels.compiling import OPTIONS, Entry, Kernel
from outrider.backends.cpu.kernels.jobs import CHUNKS, KERNEL, OWN, SCRATCH, SCRATCH_BYTES, set_word, word
from outrider.backends.cpu.kernels.linear import plan_linear
from outrider.backends.cpu.kernels.memory import (
    atomic_add,
    atomic_claim,
    atomic_load,
    atomic_swap,
    call_kernel,
    futex_wait,
    futex_wake,
    pause,
    store_i64,
)
from outrider.backends.cpu.kernels.norm import plan_norm
from outrider.backends.cpu.kernels.rotate import ATTEND_KERNEL, ROTATE_KERNEL, plan_rotate
from outrider.backends.cpu.kernels.vector import FLOAT32, LANES, load_part, store_part

# Words of the pool, a cache line apart.
TICKET, JOB, LIMIT, DONE, ASLEEP, WAITING, BUSY, STOP, THREADS = (64 * number for number in range(9))
"""Byte offsets in the pool of: the number of the job (high half) and its next chunk (low half); the address of the job;
its number of chunks; how many of them are done; how many threads sleep; whether the caller sleeps; its user;
whether threads must end; the number of threads, the caller included."""
POOL_BYTES = 64 * 9

_CLOSED = 0x7FFFFFFF
_FREE, _CALLER, _LEFT = range(3)
"""Users of the pool: none, a caller that waits for its jobs, or, from _LEFT on, a job that was left to the threads;
then the number of that job is added."""
_SPINS = 1500  # calls of `pause`, some 40 ns each

RUN_PLAIN, RUN_NORM, RUN_LINEAR, RUN_STORE, RUN_ATTEND, RUN_COPY, RUN_PROGRAM, BEGIN, SETTLE = range(9)
"""The operations that a caller can request.

RUN_PLAIN: a job whose chunks are counted already. RUN_LINEAR: the parameter is the job of a norm that runs first, or 0.
RUN_STORE: attention without queries. RUN_ATTEND: the parameter is the number of blocks whose results fit into PARTS.
RUN_COPY: in place of a job, the address of float32 numbers; the parameter is the destination. RUN_PROGRAM: in place of
a job, the address of a list of operations; the parameter is their number. The list may instead be a list of such
lists. BEGIN: the job, of the kernel ALONE, is left to the first thread that has nothing else to do, and the call
returns. SETTLE with the same job waits for its end, or runs it if no thread has. The pool stays in use until then, or
until another caller finds that the job has ended."""
WHAT, JOB_OR_SOURCE, PARAMETER, COUNT = range(4)
"""Words of one operation in a program. COUNT is the number of elements to copy."""
PROGRAM_WORDS = 4


@njit(**OPTIONS)
def _execute(job, chunk, thread):
    call_kernel(word(job, KERNEL), job, chunk, word(job, SCRATCH) + thread * word(job, SCRATCH_BYTES))


@njit(**OPTIONS)
def _take_chunks(pool, thread):
    """Runs chunks until none is left. Returns the last ticket that was read."""
    while True:
        ticket = atomic_load(pool + TICKET)
        # The limit is read from the pool, since the memory of a job that is over may be gone. A closed counter exceeds
        # any limit.
        job, chunks = atomic_load(pool + JOB), atomic_load(pool + LIMIT)
        chunk = ticket & 0xFFFFFFFF
        if chunk >= chunks:
            return ticket
        if atomic_claim(pool + TICKET, ticket, ticket + 1):
            _execute(job, chunk, thread)
            if atomic_add(pool + DONE, 1) + 1 == chunks and atomic_load(pool + WAITING) != 0:
                futex_wake(pool + DONE)


@njit(**OPTIONS)
def _serve(pool, thread):
    """Serves a pool as one of its threads until the pool is closed."""
    while atomic_load(pool + STOP) == 0:
        seen = _take_chunks(pool, thread)
        spins = 0
        while atomic_load(pool + TICKET) == seen:
            spins += 1
            if spins < _SPINS:
                pause()
                continue
            atomic_add(pool + ASLEEP, 1)
            # The futex is the high half of the ticket: the number of the job.
            if atomic_load(pool + TICKET) == seen and atomic_load(pool + STOP) == 0:
                futex_wait(pool + TICKET + 4, seen >> 32)
            atomic_add(pool + ASLEEP, -1)
            spins = 0
            if atomic_load(pool + STOP) != 0:
                return


@njit(**OPTIONS)
def _post(pool, job, chunks):
    """Offers a job's chunks to all threads."""
    number = ((atomic_load(pool + TICKET) >> 32) + 1) & 0x7FFFFFFF
    # Closed while the job is being replaced, so that no thread claims a chunk of the old job under the new limit.
    atomic_swap(pool + TICKET, (number << 32) | _CLOSED)
    store_i64(pool + JOB, job)
    store_i64(pool + LIMIT, chunks)
    store_i64(pool + DONE, 0)
    atomic_swap(pool + TICKET, number << 32)
    if atomic_load(pool + ASLEEP) != 0:
        futex_wake(pool + TICKET + 4)


@njit(**OPTIONS)
def _finish(pool, chunks):
    """Runs the chunks that no thread has taken, and waits for the others."""
    _take_chunks(pool, 0)
    spins = 0
    while atomic_load(pool + DONE) != chunks:
        spins += 1
        if spins < _SPINS:
            pause()
            continue
        atomic_swap(pool + WAITING, 1)
        done = atomic_load(pool + DONE)
        if done != chunks:
            futex_wait(pool + DONE, done)
        atomic_swap(pool + WAITING, 0)


@njit(**OPTIONS)
def _run_chunks(pool, job, shared):
    """Runs a job's chunks on all threads of the pool, or where it is not `shared` on the calling thread alone."""
    chunks = word(job, CHUNKS)
    if chunks <= 1 or not shared:
        for chunk in range(chunks):
            _execute(job, chunk, 0)
    else:
        _post(pool, job, chunks)
        _finish(pool, chunks)


@njit(**OPTIONS)
def _copy(source, target, count):
    for at in range(0, count, LANES):
        store_part(target + 4 * at, load_part(source + 4 * at, count - at), count - at)


@njit(**OPTIONS)
def _perform(pool, job, what, parameter, count, shared):
    threads = atomic_load(pool + THREADS)
    if what == RUN_PLAIN:
        _run_chunks(pool, job, shared)
    elif what == RUN_NORM:
        plan_norm(job)
        _run_chunks(pool, job, shared)
    elif what == RUN_LINEAR:
        if parameter != 0:
            plan_norm(parameter)
            _run_chunks(pool, parameter, shared)
        plan_linear(job, threads)
        _run_chunks(pool, job, shared)
    elif what == RUN_STORE:
        plan_rotate(job)
        _run_chunks(pool, job, shared)
    elif what == RUN_ATTEND:
        set_word(job, KERNEL, word(job, ROTATE_KERNEL))
        plan_rotate(job)
        _run_chunks(pool, job, shared)
        set_word(job, KERNEL, word(job, ATTEND_KERNEL))
        plan_attend(job, threads if shared else 1, parameter)
        _run_chunks(pool, job, shared)
        if plan_merge(job):
            _run_chunks(pool, job, False)
    elif what == RUN_COPY:
        _copy(job, parameter, count)


@njit(**OPTIONS)
def _play(pool, entries, count, shared):
    for number in range(count):
        entry = entries + 8 * PROGRAM_WORDS * number
        _perform(
            pool,
            word(entry, JOB_OR_SOURCE),
            word(entry, WHAT),
            word(entry, PARAMETER),
            word(entry, COUNT),
            shared,
        )


POOL, ENTRIES, ENTRY_COUNT, BEGUN = range(OWN, OWN + 4)
"""Words of a job of ALONE: the pool, the program and its length, and as whose use of the pool it began; 0 once it is
settled."""


def _play_alone(job, _chunk, _scratch):
    """Plays a program on one thread. Its jobs have their own scratch memory, of which it takes the caller's part."""
    _play(word(job, POOL), word(job, ENTRIES), word(job, ENTRY_COUNT), False)


ALONE = Kernel(_play_alone, FLOAT32)


@njit(**OPTIONS)
def _take_pool(pool):
    """Takes the pool for the caller's jobs, unless it has no other threads, another caller uses it, or what was left
    to the threads still goes on."""
    if atomic_load(pool + THREADS) <= 1:
        return False
    user = atomic_load(pool + BUSY)
    if user == _CALLER or (user >= _LEFT and atomic_load(pool + DONE) != atomic_load(pool + LIMIT)):
        return False
    # No two jobs have one number: this fails if the job that was looked at is no longer the pool's.
    return atomic_claim(pool + BUSY, user, _CALLER)


@njit(**OPTIONS)
def _begin(pool, job):
    if _take_pool(pool):
        _post(pool, job, 1)
        left = _LEFT + (atomic_load(pool + TICKET) >> 32)
        set_word(job, BEGUN, left)
        atomic_swap(pool + BUSY, left)
    else:
        _execute(job, 0, 0)


@njit(**OPTIONS)
def _settle(pool, job):
    left = word(job, BEGUN)
    if left == 0:
        return
    # If the pool is another's by now, the job has ended.
    if atomic_claim(pool + BUSY, left, _CALLER):
        _finish(pool, 1)
        atomic_swap(pool + BUSY, _FREE)
    set_word(job, BEGUN, 0)


@njit(**OPTIONS)
def _run(pool, job, what, parameter):
    # A caller that finds the pool in use runs its chunks alone.
    shared = _take_pool(pool)
    if what == RUN_PROGRAM:
        if word(job, WHAT) != RUN_PROGRAM:
            _play(pool, job, parameter, shared)
        else:
            for number in range(parameter):
                entry = job + 8 * PROGRAM_WORDS * number
                _play(pool, word(entry, JOB_OR_SOURCE), word(entry, PARAMETER), shared)
    else:
        _perform(pool, job, what, parameter, 0, shared)
    if shared:
        atomic_swap(pool + BUSY, _FREE)


def enter(pool, job, what, parameter):
    """Runs an operation. Without a job, serves the pool as thread number `what`, or where that is 0 wakes its
    threads."""
    if job == 0 and what == 0:
        futex_wake(pool + TICKET + 4)
    elif job == 0:
        _serve(pool, what)
    elif what == BEGIN:
        _begin(pool, job)
    elif what == SETTLE:
        _settle(pool, job)
    else:
        _run(pool, job, what, parameter)


ENTER = Entry(enter, "void(int64, int64, int64, int64)")


def wake_all(pool: int) -> None:
    ENTER.call(pool, 0, 0, 0)
