"""Rows of the failure table over nixl, with workers in processes of their own that are really killed and stopped."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.transfer.faults.faulty_link import FaultyLink, RealClock
from tests.transfer.faults.processes import WorkerProcess
from tests.transfer.faults.world import MAIN, Shape, Site, params_for, phase_of
from tests.transfer.workers import assert_nothing_left, make_worker

from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.engine.transfers import make_link
from outrider.sampling import SamplingParams

ANSWER_S, READ_S, LEASE_S = 0.8, 1.0, 3.0
PATIENCE_S = 30.0
SEATS = 3
SHAPE = Shape("none", "mixed", 8, 16)
LIMITS = {"lease_s": LEASE_S, "answer_limit_s": ANSWER_S, "read_limit_s": READ_S}
TRANSPORTS = ("cma", "tcp")


class Crew:
    """The processes that cases share, and spare ones, since starting takes seconds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.site = Site(SHAPE, directory)
        self._spares: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []
        self.healthy = self._start()

    def _start(self, role: str = "kv_producer", **more: Any) -> WorkerProcess:
        page = SHAPE.p_page if role == "kv_producer" else SHAPE.d_page
        transfer = LIMITS | more.pop("transfer", {})
        made = WorkerProcess(
            role,
            self.directory,
            windows=SHAPE.windows,
            drafter=SHAPE.drafter,
            block_size=page,
            transfer=transfer,
            **more,
        )
        self._all.append(made)
        return made

    def prefill(self) -> WorkerProcess:
        """Returns a prefill worker for a case that may end it."""
        self._spares.append(self._start())
        if len(self._spares) == 1:
            self._spares.append(self._start())
        return self._spares.pop(0)

    def give_back(self, worker: WorkerProcess) -> None:
        """Keep a worker for the next case if it is as good as new."""
        if worker.process.poll() is None:
            self._spares.insert(0, worker)

    def decode(self, transport: str, policy: str, hold: str) -> WorkerProcess:
        transfer = {"kv_transport": transport, "kv_load_failure_policy": policy}
        return self._start("kv_consumer", transfer=transfer, hold=hold)

    def worker(self, role: str, **more: Any) -> WorkerProcess:
        return self._start(role, **more)

    def close(self) -> None:
        for worker in self._all:
            with worker:
                pass


class Duel:
    """A decode worker in this process, and a prefill worker in one of its own."""

    def __init__(self, crew: Crew, transport: str, policy: str, seed: int) -> None:
        self.crew, self.policy, self.transport = crew, policy, transport
        rng = random.Random(seed)
        self.prompt = [rng.randrange(256) for _ in range(rng.choice((31, 32, 33, 70)))]
        self.params = params_for(seed, 8)
        self.prefill: WorkerProcess | None = None
        self.engine: Engine | None = None
        self.link: FaultyLink
        self.output: RequestOutput | None = None
        self.ticket: str | None = None
        self.is_sound = False
        """Whether the case has passed, so that its prefill worker can serve another one."""
        self.bystanders: list[tuple[RequestOutput, list[int], SamplingParams]] = []

    @property
    def d(self) -> Engine:
        assert self.engine is not None
        return self.engine

    @property
    def p(self) -> WorkerProcess:
        assert self.prefill is not None
        return self.prefill

    def start_decode(self, **transfer: Any) -> None:
        def faulty(*given: Any, **named: Any) -> FaultyLink:
            self.link = FaultyLink(make_link(*given, **named), RealClock())
            return self.link

        given = LIMITS | {"kv_connector": "nixl", "kv_transport": self.transport} | transfer
        given["kv_load_failure_policy"] = self.policy
        site = self.crew.site
        with mock.patch("outrider.engine.transfers.make_link", faulty):
            self.engine = make_worker(
                site.model, SHAPE.drafter, site.directory, "kv_consumer",
                block_size=SHAPE.d_page, max_num_seqs=SEATS, transfer=given,
            )  # fmt: skip

    def start_bystanders(self, count: int, tokens: int) -> None:
        for number in range(count):
            name, prompt = f"bystander {number}", [number + 1, *range(20 + number)]
            params = params_for(number, tokens)
            handed = self.crew.healthy.run(name, prompt, params, hand_over=True)
            self.d.add_request(name, prompt, params, ticket=handed["ticket"])
            self.bystanders.append((self.d.output(name), prompt, params))
        outputs = [output for output, *_ in self.bystanders]
        self.until(lambda: all(output.finished or len(output.outputs[0].token_ids) > 1 for output in outputs))
        assert all(output.error is None for output in outputs), [output.error for output in outputs]

    def hand_over(self) -> None:
        if self.prefill is None:
            self.prefill = self.crew.prefill()
        self.ticket = self.p.run(MAIN, self.prompt, self.params, hand_over=True)["ticket"]

    def submit(self) -> None:
        self.d.add_request(MAIN, self.prompt, self.params, ticket=self.ticket)
        self.output = self.d.output(MAIN)

    def reach(self, phase: str) -> None:
        if self.engine is None:
            self.start_decode()
        if phase == "d":
            self.start_bystanders(SEATS, 40)
        else:
            self.start_bystanders(1, 12)
        self.hand_over()
        if phase == "b":
            return
        self.link.hold(phase)
        self.submit()
        self.until(lambda: phase_of(self.d) == phase)

    def turn(self) -> None:
        if self.d.has_work:
            self.d.step()
            if self.d.waits:
                self.d.wait(0.01)
        else:
            self.d.tend()
            time.sleep(0.005)

    def until(self, done: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
        end_s = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end_s, f"this does not come to pass: phase {phase_of(self.d)!r}"
            self.turn()

    def finish(self) -> None:
        assert self.d.transfers is not None
        driver = self.d.transfers.driver
        self.until(lambda: not self.d.has_work and driver.is_idle)

    def check(self, expects: str) -> None:
        if self.output is not None:
            assert self.output.finished
            if expects == "recompute" and self.policy == "fail":
                assert self.output.error_code == "kv_transfer_failed"
                assert self.output.error is not None
                assert self.output.error.endswith("send the request again")
            else:
                assert self.output.error is None, self.output.error
                self.crew.site.check_text(self.prompt, self.params, self.output.outputs[0].token_ids)
            moved = self.output.metrics.transferred_tokens
            assert moved == (len(self.prompt) if expects == "moved" else 0)
        for output, prompt, params in self.bystanders:
            assert output.error is None
            self.crew.site.check_text(prompt, params, output.outputs[0].token_ids)
        if self.engine is not None:
            assert_nothing_left(self.engine)
        if self.prefill is not None and self.prefill.process.poll() is None:
            self.prefill.until_idle(LEASE_S + 5)
            self.prefill.ask("check pages")

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        if self.prefill is not None and self.is_sound:
            self.crew.give_back(self.prefill)
        elif self.prefill is not None:
            self.prefill.kill()


class ProcessCase(NamedTuple):
    row: str
    phase: str
    transport: str
    policy: str
    run: Callable[[Duel, str], str]
    seed: int

    def __str__(self) -> str:
        return f"{self.row} ({self.phase}), {self.transport}, {self.policy}"


_ROWS: list[tuple[str, str, tuple[str, ...], Callable[[Duel, str], str]]] = []


def row(name: str, phases: str, transports: tuple[str, ...] = TRANSPORTS) -> Callable[..., Callable[[Duel, str], str]]:
    def register(run: Callable[[Duel, str], str]) -> Callable[[Duel, str], str]:
        _ROWS.append((name, phases, transports, run))
        return run

    return register


def process_cases() -> Iterator[ProcessCase]:
    policies, seeds = itertools.cycle(("recompute", "fail", "fail", "recompute", "fail")), itertools.count(1)
    for name, phases, transports, run in _ROWS:
        for phase, transport in itertools.product(phases, transports):
            yield ProcessCase(name, phase, transport, next(policies), run, next(seeds))


def run_process_case(case: ProcessCase, crew: Crew) -> None:
    """Raises AssertionError with what is wrong."""
    duel = Duel(crew, case.transport, case.policy, case.seed)
    try:
        duel.check(case.run(duel, case.phase))
        duel.is_sound = True
    finally:
        duel.close()


# --- the rows -------------------------------------------------------------------------------------------


def unless_decoding(phase: str) -> str:
    return "recompute" if phase <= "f" else "moved"


@row("the prefill worker is killed", "bcdefg")
def killed(duel: Duel, phase: str) -> str:
    duel.reach(phase)
    duel.p.kill()
    if phase == "b":
        duel.submit()
    duel.link.open()
    duel.finish()
    return unless_decoding(phase)


@row("the prefill worker is stopped for good", "bcdefg")
def stopped(duel: Duel, phase: str) -> str:
    duel.reach(phase)
    duel.p.stop()
    if phase == "b":
        duel.submit()
    duel.link.open()
    duel.finish()
    # The memory of a stopped process can be read over cma, but what was read is not used without its confirmation.
    assert duel.link.fenced or not (duel.transport == "tcp" and phase in "de")
    duel.p.kill()
    return unless_decoding(phase)


@row("the prefill worker is stopped, and goes on in time", "bcdefg")
def pauses(duel: Duel, phase: str) -> str:
    duel.reach(phase)
    duel.p.stop()
    if phase == "b":
        duel.submit()
    duel.link.open()
    end_s = time.monotonic() + ANSWER_S / 2
    duel.until(lambda: time.monotonic() > end_s)
    duel.p.go_on()
    duel.finish()
    return "moved"


@row("the prefill worker is stopped, and goes on too late", "cdef")
def wakes_up(duel: Duel, phase: str) -> str:
    duel.reach(phase)
    duel.p.stop()
    duel.link.open()
    output = duel.output
    assert output is not None
    duel.until(lambda: output.finished)
    duel.p.go_on()
    duel.finish()
    return "recompute"


@row("the prefill worker is restarted at the same address", "bdf")
def restarted(duel: Duel, phase: str) -> str:
    duel.reach(phase)
    endpoint = duel.p.endpoint
    duel.p.kill()
    port = int(endpoint.rpartition(":")[2])
    duel.prefill = duel.crew.worker("kv_producer", transfer={"kv_port": port})
    assert duel.p.endpoint == endpoint
    if phase == "b":
        duel.submit()
    duel.link.open()
    duel.finish()
    duel.check("recompute")
    # A ticket of the new one is good at once.
    duel.bystanders.clear()
    duel.d.reset_prefix_cache()
    duel.hand_over()
    duel.submit()
    duel.finish()
    return "moved"


@row("the client disconnects", "cdefg")
def disconnects(duel: Duel, phase: str) -> str:
    duel.reach(phase)
    duel.d.abort(MAIN)
    duel.output = None
    duel.link.open()
    duel.finish()
    # Released: the prefill worker does not wait for the end of the lease.
    began_s = time.monotonic()
    duel.p.until_idle(LEASE_S)
    assert time.monotonic() - began_s < LEASE_S / 2
    return "ended"


@row("the client disconnects while the prefill worker is stopped", "cef")
def disconnects_from_stopped(duel: Duel, phase: str) -> str:
    duel.reach(phase)
    duel.p.stop()
    duel.link.open()
    duel.turn()
    duel.d.abort(MAIN)
    duel.output = None
    duel.finish()
    duel.p.go_on()
    return "ended"


# --- decode workers in processes of their own -----------------------------------------------------------


def far_decode(duel: Duel, phase: str) -> WorkerProcess:
    """Bring a request into a phase on a decode worker in another process."""
    worker = duel.crew.decode(duel.transport, duel.policy, "" if phase == "g" else phase)
    # Before the lease begins: starting takes seconds.
    assert worker.endpoint
    duel.hand_over()
    params = params_for(0, 180) if phase == "g" else duel.params
    worker.start(MAIN, duel.prompt, params, ticket=duel.ticket)
    if phase == "g":
        duel.p.until_idle(LEASE_S)
    else:
        assert worker.read() == {"phase": phase}
    return worker


@row("the decode worker is killed", "cefg")
def decode_killed(duel: Duel, phase: str) -> str:
    with far_decode(duel, phase) as worker:
        before = duel.p.ask("state")["expired"]
        worker.kill()
        state = duel.p.until_idle(LEASE_S + 2)
        assert state["expired"] - before == (phase != "g")
    # The router sends the request elsewhere.
    duel.reach("f")
    duel.link.open()
    duel.finish()
    return "moved"


@row("the decode worker is stopped for longer than a lease", "cef")
def decode_stopped(duel: Duel, phase: str) -> str:
    with far_decode(duel, phase) as worker:
        worker.stop()
        duel.p.until_idle(LEASE_S + 2)
        worker.go_on()
        worker.tell("open")
        answer = worker.read()
        if duel.policy == "fail":
            assert answer["error"].endswith("send the request again")
        else:
            assert answer["error"] is None
            duel.crew.site.check_text(duel.prompt, duel.params, answer["tokens"])
        worker.until_idle(5)
        worker.ask("check pages")
    return "ended"
