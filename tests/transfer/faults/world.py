"""Two prefill workers, a decode worker and a single worker under a clock that tests turn, with a link that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.transfer.faults.faulty_link import Clock, FaultyLink
from tests.transfer.workers import ask, assert_nothing_left, make_model, make_worker

from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.engine.ties import examine, first_difference
from outrider.engine.transfers import make_link
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams
from outrider.scheduler import State
from outrider.transfer.hand_offs import Phase

TURN_S = 0.01
ANSWER_S, READ_S, LEASE_S = 1.0, 3.0, 6.0
PATIENCE_S = 40.0
"""Time, by the turned clock, after which a case hangs: every wait of the product together is shorter."""
SEATS = 4
MAIN = "main"
BYSTANDERS = ("bystander 0", "bystander 1")
MAIN_TOKENS, BYSTANDER_TOKENS = 8, 24
PHASES = {Phase.ASKING: "c", Phase.QUEUED: "d", Phase.READING: "e", Phase.CONFIRMING: "f"}


class InjectedError(Exception):
    """Raised in the middle of a step by a test."""


class Shape(NamedTuple):
    """What a case runs on."""

    drafter: str
    windows: str
    p_page: int
    d_page: int


SHAPES = (
    Shape("none", "full", 16, 16),
    Shape("eagle3", "mixed", 8, 32),
    Shape("draft model", "sliding", 16, 8),
    Shape("ngram", "mixed", 32, 16),
    Shape("full", "mixed", 16, 16),
    Shape("mtp, qwen", "sliding", 8, 8),
)


class Waits:
    """How long hand-offs stay in phases that have a limit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: dict[tuple[str, Phase], float] = {}
        self.longest_s: dict[Phase, float] = {}

    def look(self, engine: Engine) -> None:
        assert engine.transfers is not None
        now = {(each.sequence, each.phase) for each in engine.transfers.driver._hand_offs.current()}
        self._since_s = {key: since_s for key, since_s in self._since_s.items() if key in now}
        for key in now:
            since_s = self._since_s.setdefault(key, self._clock.now_s)
            self.longest_s[key[1]] = max(self.longest_s.get(key[1], 0.0), self._clock.now_s - since_s)

    def check(self, slack_s: float) -> None:
        limits = {Phase.ASKING: 2 * ANSWER_S, Phase.READING: READ_S, Phase.CONFIRMING: 2 * ANSWER_S}
        for phase, limit_s in limits.items():
            assert self.longest_s.get(phase, 0.0) <= limit_s + slack_s + 10 * TURN_S, f"{phase}: {self.longest_s}"


@dataclass
class Site:
    """What all cases of a shape share: models, drafters, a single worker, and the texts that it gave."""

    shape: Shape
    directory: Path
    model: LoadedModel = field(init=False)
    single: Engine = field(init=False)
    _texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = make_model(self.shape.windows)
        self.single = make_worker(self.model, self.shape.drafter, self.directory, None)

    def _text(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """What a single worker says."""
        key = (params.seed or 0, params.max_tokens or 0, *prompt)
        if key not in self._texts:
            self._texts[key] = ask(self.single, f"r{len(self._texts)}", prompt, params).outputs[0].token_ids
        return self._texts[key]

    def check_text(self, prompt: list[int], params: SamplingParams, text: list[int]) -> None:
        """Raise unless this is a single worker's text, up to ties that are proven: a batch of another shape may add up
        its products in another order."""
        assert params.max_tokens is not None
        expected, done = self._text(prompt, params), 0
        while (place := first_difference(text[done:], expected)) is not None:
            place += done
            assert place < params.max_tokens, "a text of another length"
            before, pair = [*prompt, *text[:place]], (text[place], expected[place - done])
            parting = examine(self.single, before, pair, params)
            assert parting.tied, f"token {place} is {pair[0]}, a single worker says {pair[1]}: {parting}"
            done = place + 1
            if done == params.max_tokens:
                return
            expected = self._text([*before, pair[0]], replace(params, max_tokens=params.max_tokens - done))

    def worker(self, role: str, *, model: LoadedModel | None = None, drafter: str | None = None, **more: Any) -> Engine:
        page = self.shape.p_page if role == "kv_producer" else self.shape.d_page
        limits = {"lease_s": LEASE_S, "answer_limit_s": ANSWER_S, "read_limit_s": READ_S}
        transfer = limits | more.pop("transfer", {})
        settings = {"block_size": page, "max_num_seqs": SEATS, "transfer": transfer} | more
        return make_worker(model or self.model, drafter or self.shape.drafter, self.directory, role, **settings)


def params_for(seed: int, tokens: int) -> SamplingParams:
    """Greedy or drawn."""
    return SamplingParams(temperature=0.8 if seed % 2 else 0.0, seed=seed, max_tokens=tokens)


class World:
    """The workers of one case. `prefill` serves the request that the case is about, `healthy` serves the others."""

    def __init__(self, site: Site, policy: str, seed: int, clock: Clock) -> None:
        self.site, self.policy, self.clock = site, policy, clock
        self.rng = random.Random(seed)
        self.prefill: Engine | None = site.worker("kv_producer")
        self.healthy = site.worker("kv_producer")
        self.decode: Engine | None = None
        self.link: FaultyLink
        self.prompt = [self.rng.randrange(256) for _ in range(self.rng.choice((31, 32, 33, 47, 48, 70)))]
        self.params = params_for(seed, MAIN_TOKENS)
        self.ticket: str | None = None
        self.output: RequestOutput | None = None
        self.bystanders: list[tuple[RequestOutput, list[int], SamplingParams]] = []
        self.waits = Waits(clock)
        self.stopped_s = 0.0
        """How long the decode worker itself was stopped, which prolongs every wait."""
        self.was_interrupted = False
        self.injected: list[RequestOutput] = []
        """Requests that ended with a step that a test interrupted."""

    # --- workers --------------------------------------------------------------------------------------

    def start_decode(self, **more: Any) -> None:
        def faulty(*given: Any, **named: Any) -> FaultyLink:
            self.link = FaultyLink(make_link(*given, **named), self.clock)
            return self.link

        transfer = {"kv_load_failure_policy": self.policy}
        with mock.patch("outrider.engine.transfers.make_link", faulty):
            self.decode = self.site.worker("kv_consumer", transfer=transfer, **more)

    @property
    def d(self) -> Engine:
        assert self.decode is not None
        return self.decode

    @property
    def p(self) -> Engine:
        assert self.prefill is not None
        return self.prefill

    @property
    def endpoint(self) -> str:
        assert self.p.transfers is not None
        return self.p.transfers.link.endpoint

    def new_prefill(self, **more: Any) -> None:
        """Have another prefill worker compute the request."""
        self.p.close()
        self.prefill = self.site.worker("kv_producer", **more)

    def kill_prefill(self) -> None:
        self.p.close()
        self.prefill = None

    def kill_decode(self) -> None:
        self.d.close()
        self.decode = None

    # --- requests -------------------------------------------------------------------------------------

    def start_bystanders(self, count: int = len(BYSTANDERS), tokens: int = BYSTANDER_TOKENS) -> None:
        """Requests that a healthy prefill worker hands over; they decode while the case goes on."""
        for number in range(count):
            name, prompt = f"bystander {number}", [number + 1, *range(20 + number)]
            params = params_for(number, tokens)
            handed = ask(self.healthy, name, prompt, params, hand_over=True)
            assert handed.ticket is not None
            self.d.add_request(name, prompt, params, ticket=handed.ticket)
            self.bystanders.append((self.d.output(name), prompt, params))
        self.until(lambda: all(len(output.outputs[0].token_ids) > 1 for output, *_ in self.bystanders))

    def hand_over(self) -> None:
        output = ask(self.p, MAIN, self.prompt, self.params, hand_over=True)
        self.ticket = output.ticket

    def submit(self, *, ticket: str | None = None, prompt: list[int] | None = None, salt: str = "") -> None:
        self.d.add_request(MAIN, prompt or self.prompt, self.params, ticket=ticket or self.ticket, salt=salt)
        self.output = self.d.output(MAIN)

    @property
    def phase(self) -> str:
        """Where the request stands on the decode worker; empty once it has ended or before it came."""
        return "" if self.decode is None else phase_of(self.decode)

    # --- time -----------------------------------------------------------------------------------------

    def turn(self, *, decode: bool = True) -> None:
        """One step of every worker that has something to do."""
        self.clock.now_s += TURN_S
        for engine in (self.prefill, self.healthy, self.decode if decode else None):
            if engine is None:
                continue
            if not engine.has_work:
                engine.tend()
                continue
            live = [each.output for each in engine._live.requests.values()]
            try:
                engine.step()
            except InjectedError:
                self.was_interrupted = True
                self.injected += [output for output in live if output.finished]
        if self.decode is not None:
            if decode:
                self.waits.look(self.decode)
            for _ in range(250):
                # The real link copies on a thread of its own, in real time.
                if not self.link.num_copying:
                    break
                self.link.inner.wait(0.02)
                self.link.look()

    def until(self, done: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
        end_s = self.clock.now_s + limit_s
        while not done():
            assert self.clock.now_s < end_s, f"this does not come to pass: phase {self.phase!r}"
            self.turn()

    def pass_time(self, seconds: float, *, decode: bool = True) -> None:
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.turn(decode=decode)

    def finish(self) -> None:
        """Run until everything has ended; raises if something does not."""

        def is_over() -> bool:
            engines = [each for each in (self.prefill, self.healthy, self.decode) if each is not None]
            return not any(each.has_work for each in engines) and all(
                each.transfers is None or each.transfers.driver.is_idle for each in engines
            )

        self.until(is_over)

    # --- the verdict ----------------------------------------------------------------------------------

    def check(self, expects: str) -> None:
        """`expects`: what becomes of the request: text, moved (text, and all KV came from the prefill worker), moved
        target (the drafter's did not), recompute (text, or an error under the policy fail), interrupted (an error if it
        had rows in the step) or ended (aborted or refused)."""
        if expects not in ("interrupted", "ended"):
            assert self.output is not None
            assert self.output.finished
            metrics = self.output.metrics
            if expects.startswith("moved"):
                assert metrics.transfer is not None
                assert metrics.transfer.bytes > 0 or metrics.cached_tokens == len(self.prompt)
            if expects == "moved":
                assert metrics.cached_tokens + metrics.transferred_tokens == len(self.prompt), metrics
            if expects == "recompute" and self.policy == "fail":
                assert self.output.error_code == "kv_transfer_failed", self.output
                assert self.output.error is not None
                assert self.output.error.endswith("send the request again")
                # What was streamed before is right all the same.
                given = self.output.outputs[0].token_ids
                if given:
                    self.site.check_text(self.prompt, replace(self.params, max_tokens=len(given)), given)
            else:
                assert self.output.error is None, self.output.error
                self.site.check_text(self.prompt, self.params, self.output.outputs[0].token_ids)
        if expects == "interrupted":
            assert self.output is not None
            assert (self.output.error is not None) == (self.output in self.injected)
            if self.output.error is None:
                self.site.check_text(self.prompt, self.params, self.output.outputs[0].token_ids)
        if self.decode is not None:
            for output, prompt, params in self.bystanders:
                if output not in self.injected:
                    assert output.error is None, f"{output.request_id}: {output.error}"
                    self.site.check_text(prompt, params, output.outputs[0].token_ids)
            self.waits.check(self.stopped_s)

    def check_pages(self) -> None:
        for engine in (self.prefill, self.healthy, self.decode):
            if engine is not None:
                assert_nothing_left(engine)
                assert engine.transfers is not None
                assert engine.transfers.driver.lender.held_pages == 0

    def close(self) -> None:
        for engine in (self.prefill, self.healthy, self.decode):
            if engine is not None:
                engine.close()


def phase_of(decode: Engine, name: str = MAIN) -> str:
    """Returns where a request stands on its decode worker; empty before it came and after it has ended."""
    assert decode.transfers is not None
    for hand_off in decode.transfers.driver._hand_offs.current():
        if hand_off.sequence.startswith(f"{name}~"):
            return PHASES[hand_off.phase]
    for request in decode.scheduler.requests.values():
        if request.id.startswith(f"{name}~") and request.state is State.DECODING and request.generated > 1:
            # Beyond its first token, so that its KV is used.
            return "g"
    return ""


@contextmanager
def turned_clock() -> Iterator[Clock]:
    """Has all engines that are made meanwhile run by a clock that tests turn."""
    clock = Clock()
    with mock.patch("outrider.engine.transfers.time", clock):
        yield clock


@contextmanager
def interrupted(engine: Engine, where: str) -> Iterator[None]:
    """Interrupt the engine's next step at one place, once."""
    places: dict[str, tuple[Any, str]] = {
        "run": (engine.runner, "run"),
        "schedule": (engine.scheduler.planner, "plan_decodes"),
        "commit": (engine.scheduler.kv, "complete"),
        "after": (engine._delivery, "hand_out"),
    }
    owner, name = places[where]
    original, done = getattr(owner, name), []

    def once(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(True)
            raise InjectedError(where)
        return original(*args, **options)

    with mock.patch.object(owner, name, once):
        yield
