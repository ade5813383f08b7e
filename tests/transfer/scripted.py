"""Two transfer drivers over schedulers without a model. The test decides what the link does, message by message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.kv.fakes import Engine, drafter, full, ids, make_manager, sliding

from outrider.kv.prefix import CacheIdentity
from outrider.scheduler import RequestSpec, Role
from outrider.transfer.driver import TransferDriver
from outrider.transfer.lending import Lender
from outrider.transfer.link import Event, Failed, GroupRead, Landed, Quiet, Received
from outrider.transfer.messages import Message, decode, encode
from outrider.transfer.offers import prompt_binding
from outrider.transfer.records import FirstToken, TransferLimits
from outrider.transfer.tickets import ClusterKey, Ticket

KEY = ClusterKey("a key that only these tests know")
LIMITS = TransferLimits(lease_s=30.0, renew_s=5.0, answer_s=5.0, read_s=20.0, held_share=1.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class ScriptedLink:
    """A link whose messages and reads do nothing by themselves."""

    endpoint: str
    transport: str = "scripted"
    sent: list[tuple[str, Message]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    reads: dict[int, GroupRead] = field(default_factory=dict)
    """Reads that have not ended."""
    fenced: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    started: int = 0

    def introduction(self) -> bytes:
        return b"scripted"

    def meet(self, peer: str, introduction: bytes) -> None:
        assert introduction == b"scripted"

    def send(self, peer: str, message: Message) -> None:
        self.sent.append((peer, message))

    def read(self, peer: str, read: GroupRead) -> int:
        self.started += 1
        self.reads[self.started] = read
        return self.started

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def fence(self, peer: str) -> None:
        self.fenced.append(peer)

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)

    def fileno(self) -> int:
        raise AssertionError("nothing waits on a scripted link")

    def wait(self, limit_s: float) -> None:
        raise AssertionError("nothing waits on a scripted link")

    def close(self) -> None:
        pass

    # ---- what the test does ------------------------------------------------------------------------

    def take_sent(self, *kinds: type[Message]) -> list[Message]:
        """Returns the messages of these kinds (all, without one) that were sent since the last call."""
        sent = [message for _peer, message in self.sent if not kinds or isinstance(message, kinds)]
        self.sent.clear()
        return sent

    def land(self, *numbers: int) -> None:
        """End reads with all of their bytes; without numbers all of them."""
        for number in numbers or list(self.reads):
            del self.reads[number]
            self.events.append(Landed(number))

    def fail(self, *numbers: int, reason: str = "the connection was lost") -> None:
        for number in numbers or list(self.reads):
            del self.reads[number]
            self.events.append(Failed(number, reason))

    def fall_quiet(self, peer: str) -> None:
        """Answer a fence."""
        self.fail()
        self.events.append(Quiet(peer))


class ScriptedWorker:
    """A scheduler with its driver; `engine` runs its steps with the fake target."""

    def __init__(
        self,
        name: str,
        role: Role,
        clock: Clock,
        *,
        method: str = "chain_from_taps",
        weights: str = "llama",
        pages: int = 60,
        known_tiers: tuple[Any, ...] = (),
        limits: TransferLimits = LIMITS,
        **config: Any,
    ) -> None:
        footprint = {} if method == "none" else {"footprint": drafter(method)}
        kv = make_manager(
            full(page=8),
            sliding(6, page=8),
            pages=pages,
            identity=CacheIdentity(weights=weights),
            max_model_len=4096,
            step_tokens=64,
            keep_margin=2 if role is not Role.DECODE else 0,
            tiers=known_tiers,
            **footprint,
        )
        self.engine = Engine(kv, role=role, **config)
        self.scheduler, self.kv = self.engine.scheduler, kv
        self.link = ScriptedLink(name)
        times: dict[str, Callable[[], float]] = {"clock": clock, "time_of_day": clock}
        self.lender = Lender(self.scheduler, engine=f"{name}.1", key=KEY, limits=limits, **times)
        self.driver = TransferDriver(self.scheduler, self.link, self.lender, **times)

    def step(self) -> None:
        """Run one step as an engine does."""
        self.driver.advance()
        plan = self.scheduler.schedule()
        self.driver.start_loads()
        self.engine._note(self.scheduler.commit(plan, self.engine._run(plan)))

    def hand_over(self, name: str, length: int = 40) -> Ticket:
        """Compute a prompt and hand it over; returns what the ticket says."""
        prompt = ids(length)
        self.scheduler.add(RequestSpec(id=name, prompt=prompt, max_tokens=1, k=2, hand_over=True))
        while self.engine.finished.get(name) != "prefilled":
            self.step()
        first = FirstToken(self.engine.text[name][0], seed=0)
        sealed = self.driver.hand_over(name, binding=prompt_binding(ids(length)), first=first)
        assert sealed is not None
        return KEY.open(sealed)

    def fetch(self, name: str, ticket: Ticket, length: int = 40, max_tokens: int = 12) -> None:
        prompt = ids(length)
        self.scheduler.add(RequestSpec(id=name, prompt=prompt, max_tokens=max_tokens, k=2, awaits_peer=True))
        self.driver.fetch(name, ticket, binding=prompt_binding(ids(length)))

    def answers(self, *others: ScriptedWorker) -> int:
        """Answer what other workers have sent to this one; returns the number of messages."""
        count = 0
        for other in others:
            mine = [message for peer, message in other.link.sent if peer == self.link.endpoint]
            other.link.sent[:] = [sent for sent in other.link.sent if sent[0] != self.link.endpoint]
            for message in mine:
                count += 1
                answer = self.lender.desk.answer(decode(encode(message)), self.link.introduction)
                if answer is not None:
                    other.link.events.append(Received(self.link.endpoint, decode(encode(answer))))
        return count

    def assert_empty(self) -> None:
        """No page is held, and nothing is on its way."""
        assert self.driver.is_idle
        assert self.lender.held_pages == 0
        self.kv.check_integrity()
        self.kv.reset_cache()
        assert [arena.num_free for arena in self.kv.pool.arenas] == [
            arena.num_pages - 1 for arena in self.kv.pool.arenas
        ]


def talk(prefill: ScriptedWorker, decode_worker: ScriptedWorker) -> None:
    """Let both workers answer each other until there is nothing left to say."""
    for _ in range(20):
        decode_worker.driver.advance()
        if not prefill.answers(decode_worker):
            return
    raise AssertionError("the two workers do not come to an end")
