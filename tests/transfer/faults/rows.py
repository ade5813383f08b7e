"""The failure table of prefill/decode disaggregation: each row as what happens to a world, phase by phase.

The phases are: a, the prefill worker computes; b, its KV is held and unclaimed; c, the decode worker asks for it; d,
the request is queued there; e, KV is read; f, it is confirmed; g, the request decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from tests.transfer.faults.faulty_link import Delays
from tests.transfer.faults.world import (
    ANSWER_S,
    LEASE_S,
    MAIN,
    SEATS,
    World,
    interrupted,
)
from tests.transfer.workers import CLUSTER_KEY

from outrider.errors import ConfigError, RequestError
from outrider.transfer.link import GroupRead
from outrider.transfer.messages import (
    PROTOCOL,
    Confirm,
    Confirmed,
    Fetch,
    Hello,
    Message,
    Offered,
    Release,
    Renew,
    Welcome,
)
from outrider.transfer.tickets import ClusterKey

SHORT_LEASE_S = 0.3
KEY = ClusterKey(CLUSTER_KEY)
Scenario = Callable[[World, str], str]
"""Runs a case up to its end, and returns what becomes of the request: see `World.check`."""


class Row(NamedTuple):
    name: str
    phases: str
    run: Scenario


ROWS: list[Row] = []


def row(name: str, phases: str) -> Callable[[Scenario], Scenario]:
    def register(run: Scenario) -> Scenario:
        ROWS.append(Row(name, phases, run))
        return run

    return register


def reach(world: World, phase: str, *, bystander_tokens: int = 24, **decode: object) -> None:
    """Bring the request into a phase, and keep it there until the link is opened."""
    if world.decode is None:
        world.start_decode(**decode)
        world.start_bystanders(SEATS if phase == "d" else 2, bystander_tokens)
    if phase == "a":
        world.p.add_request(MAIN, world.prompt, world.params, hand_over=True)
        return
    if world.ticket is None:
        world.hand_over()
    if phase == "b":
        return
    world.link.hold(phase)
    if phase == "c" and world.rng.random() < 0.5:
        world.link.rules.holds = lambda message: isinstance(message, Hello)
    world.submit()
    world.until(lambda: world.phase == phase)


def unless_decoding(phase: str) -> str:
    return "recompute" if phase <= "f" else "text"


# --- prefill workers ------------------------------------------------------------------------------------


@row("the prefill worker dies", "abcdefg")
def prefill_dies(world: World, phase: str) -> str:
    reach(world, phase)
    if phase == "a":
        failed, world.prefill = world.p, None
        failed.close()
        world.prefill, world.healthy = world.healthy, world.site.worker("kv_producer")
        world.hand_over()
        world.submit()
        world.finish()
        return "moved"
    world.kill_prefill()
    if phase == "b":
        world.submit()
    world.link.open()
    world.finish()
    return unless_decoding(phase)


@row("the prefill worker dies, and its reads never end", "e")
def prefill_dies_silently(world: World, phase: str) -> str:
    reach(world, phase)
    world.kill_prefill()
    world.finish()
    assert world.link.fenced
    return "recompute"


@row("the prefill worker stops answering", "acdefg")
def prefill_stops(world: World, phase: str) -> str:
    reach(world, phase)
    if phase == "a":
        # Its request waits there; meanwhile the router asks another one.
        stopped, world.prefill = world.p, world.site.worker("kv_producer")
        world.hand_over()
        world.submit()
        world.until(lambda: world.output is not None and world.output.finished)
        world.prefill.close()
        world.prefill = stopped
        world.finish()
        return "moved"
    endpoint = world.endpoint
    world.link.rules.stopped.add(endpoint)
    world.link.open()
    output = world.output
    assert output is not None
    world.until(lambda: output.finished)
    if phase == "e":
        assert world.link.fenced
    copied = world.link.late_copies
    world.link.continue_peer(endpoint)
    world.finish()
    assert world.link.late_copies == copied, "bytes of a read that was given up have landed"
    return unless_decoding(phase)


@row("the prefill worker stops, and goes on in time", "cdefg")
def prefill_pauses(world: World, phase: str) -> str:
    reach(world, phase)
    world.link.rules.stopped.add(world.endpoint)
    world.link.open()
    world.pass_time(0.7 * ANSWER_S)
    world.link.continue_peer(world.endpoint)
    world.finish()
    return "moved"


# --- decode workers -------------------------------------------------------------------------------------


@row("the decode worker dies", "bcdefg")
def decode_dies(world: World, phase: str) -> str:
    reach(world, phase)
    world.kill_decode()
    world.bystanders = []
    assert world.p.transfers is not None
    expired = world.p.transfers.driver.counters.leases_expired
    world.pass_time(LEASE_S + 0.1)
    assert world.p.transfers.driver.is_idle
    assert world.p.transfers.driver.counters.leases_expired - expired == (phase != "g")
    # The router sends the request elsewhere.
    world.ticket = world.output = None
    reach(world, "g")
    world.finish()
    return "moved"


@row("the decode worker stops", "cdefg")
def decode_stops(world: World, phase: str) -> str:
    reach(world, phase)
    world.stopped_s = LEASE_S + 1
    world.pass_time(world.stopped_s, decode=False)
    world.link.open()
    world.finish()
    return unless_decoding(phase)


@row("the lease ends", "bdef")
def lease_ends(world: World, phase: str) -> str:
    world.new_prefill(transfer={"lease_s": SHORT_LEASE_S})
    world.start_decode()
    world.start_bystanders(SEATS if phase == "d" else 2, 60 if phase == "d" else 24)
    world.link.rules.sent = lambda _peer, message: [] if isinstance(message, Renew) else [0.0]
    reach(world, phase)
    world.pass_time(2 * SHORT_LEASE_S)
    assert world.p.transfers is not None
    assert world.p.transfers.driver.is_idle
    if phase == "b":
        world.submit()
    world.link.open()
    world.finish()
    return "recompute"


@row("the decode worker is short of pages", "d")
def short_of_pages(world: World, phase: str) -> str:
    world.new_prefill(transfer={"lease_s": SHORT_LEASE_S})
    budget = 1 << 13
    while world.decode is None:
        try:
            world.start_decode(kv_cache_memory_bytes=budget, max_model_len=128)
        except ConfigError:
            budget = budget * 9 // 8
    world.start_bystanders(3, 90)
    world.prompt = [world.rng.randrange(256) for _ in range(110)]
    world.hand_over()
    world.submit()
    world.pass_time(0.05)
    waited = world.phase == "d"
    world.finish()
    # Windows and large pages leave more room than this takes.
    shape = world.site.shape
    assert waited or shape.windows == "sliding" or shape.d_page > 16, "the request found pages at once"
    return "moved"


# --- clients and routers --------------------------------------------------------------------------------


def abort(world: World, phase: str) -> str:
    reach(world, phase)
    if phase == "a":
        world.p.abort(MAIN)
    elif phase != "b":
        world.d.abort(MAIN)
    world.turn()
    if phase == "e":
        assert world.d.transfers is not None
        assert world.d.transfers.driver._quarantine, "the pages of a read that goes on were given back"
    world.link.open()
    world.finish()
    return "ended"


@row("the client disconnects", "abcdefg")
def client_disconnects(world: World, phase: str) -> str:
    return abort(world, phase)


@row("the router dies", "bcdefg")
def router_dies(world: World, phase: str) -> str:
    # The decode worker is told by its channel, as it is of a client; the prefill worker by nothing.
    return abort(world, phase)


@row("the client disconnects while the prefill worker is stopped", "cdef")
def client_disconnects_from_stopped(world: World, phase: str) -> str:
    reach(world, phase)
    world.link.rules.stopped.add(world.endpoint)
    world.d.abort(MAIN)
    world.turn()
    assert world.d.transfers is not None
    # Without an answer of the prefill worker, everything on this worker ends all the same.
    world.until(lambda: world.d.transfers is not None and world.d.transfers.driver.is_idle)
    world.link.continue_peer(world.endpoint)
    world.link.open()
    world.finish()
    assert world.link.late_copies == 0
    return "ended"


# --- reads ----------------------------------------------------------------------------------------------


def failing_reads(of: Callable[[World, GroupRead], bool]) -> Scenario:
    def run(world: World, phase: str) -> str:
        world.start_decode()
        world.start_bystanders()
        failed: list[GroupRead] = []

        def fails(read: GroupRead) -> bool:
            if of(world, read):
                failed.append(read)
            return of(world, read)

        world.link.rules.fails_read = fails
        reach(world, "e")
        world.link.open()
        world.finish()
        targets = world.d.scheduler.kv.layout.target_groups
        if any(read.group in targets for read in failed):
            return "recompute"
        assert world.d.transfers is not None
        assert world.d.transfers.recomputed_prompts == 0
        return "text"

    return run


row("a read of one of the target's groups fails", "e")(failing_reads(lambda world, read: read.group == 0))
row("all reads fail", "e")(failing_reads(lambda world, read: True))
row("a read of the drafter's KV fails", "e")(
    failing_reads(lambda world, read: read.group in world.d.scheduler.kv.layout.draft_groups)
)


@row("reads of the drafter's KV never end", "e")
def draft_reads_hang(world: World, phase: str) -> str:
    reach(world, phase)
    draft = world.d.scheduler.kv.layout.draft_groups
    kept = [held for held in world.link._held if held.read.group in draft]
    world.link._held = [held for held in world.link._held if held.read.group not in draft]
    world.link.open()
    world.link._held = [*kept]
    world.finish()
    assert bool(world.link.fenced) == bool(kept)
    return "text"


# --- messages -------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[type[Message], ...]] = {
    "c": (Hello, Welcome, Fetch, Offered),
    "d": (Renew,),
    "e": (Renew,),
    "f": (Confirm, Confirmed),
    "g": (Release,),
}


def disturbed(world: World, phase: str, delays: Delays) -> None:
    """Run a request whose messages of a phase are disturbed on their way to its prefill worker and back."""
    world.start_decode()
    world.start_bystanders(SEATS if phase == "d" else 2)
    endpoint = world.endpoint

    def apply(peer: str, message: Message) -> list[float]:
        return delays(peer, message) if peer == endpoint and isinstance(message, KINDS[phase]) else [0.0]

    world.link.rules.sent = world.link.rules.received = apply
    reach(world, phase)
    world.pass_time(0.1)
    world.link.open()
    world.finish()


@row("messages are repeated", "cdefg")
def messages_repeated(world: World, phase: str) -> str:
    disturbed(world, phase, lambda _peer, _message: [0.0, 0.0, 0.3, 2.5])
    return "moved"


@row("messages are late", "cdefg")
def messages_late(world: World, phase: str) -> str:
    disturbed(world, phase, lambda _peer, _message: [0.15])
    return "moved"


@row("messages are lost once", "cdefg")
def messages_lost(world: World, phase: str) -> str:
    kind = world.rng.choice(KINDS[phase])
    seen: set[type[Message]] = set()

    def first_is_lost(_peer: str, message: Message) -> list[float]:
        first = isinstance(message, kind) and kind not in seen
        seen.add(type(message))
        return [] if first else [0.0]

    disturbed(world, phase, first_is_lost)
    return "moved"


@row("all messages are lost", "cf")
def all_lost(world: World, phase: str) -> str:
    disturbed(world, phase, lambda _peer, _message: [])
    return "recompute"


@row("messages come too late", "cf")
def too_late(world: World, phase: str) -> str:
    disturbed(world, phase, lambda _peer, _message: [2 * ANSWER_S + 0.5])
    return "recompute"


@row("messages are reordered", "cdefg")
def reordered(world: World, phase: str) -> str:
    disturbed(world, phase, lambda _peer, _message: [world.rng.uniform(0.0, 0.2) for _ in range(2)])
    return "moved"


# --- workers and prompts that differ --------------------------------------------------------------------


@row("the weights differ", "c")
def weights_differ(world: World, phase: str) -> str:
    other = replace(world.site.model, fingerprint="other weights")
    world.new_prefill(model=other)
    reach(world, "b")
    world.submit()
    world.finish()
    assert world.link.late_copies == 0
    return "recompute"


@row("the layout differs", "c")
def layout_differs(world: World, phase: str) -> str:
    from tests.engine.tiny import tiny_model, tiny_spec

    other = replace(tiny_model(tiny_spec(windows=(9, 9, 9))), fingerprint=world.site.model.fingerprint)
    world.new_prefill(model=other, drafter="none")
    reach(world, "b")
    world.submit()
    world.finish()
    return "recompute"


@row("the protocol's version differs", "c")
def version_differs(world: World, phase: str) -> str:
    reach(world, "b")
    assert world.ticket is not None
    newer = type(KEY.open(world.ticket))(
        **{
            name: getattr(KEY.open(world.ticket), name)
            for name in ("engine", "endpoint", "lease", "binding", "expires_s")
        },
        version=PROTOCOL + 1,
    )
    world.submit(ticket=KEY.seal(newer))
    world.finish()
    return "recompute"


@row("the drafter differs", "c")
def drafter_differs(world: World, phase: str) -> str:
    other = "none" if world.site.shape.drafter != "none" else "eagle3"
    world.new_prefill(drafter=other)
    reach(world, "b")
    world.submit()
    world.finish()
    assert world.d.transfers is not None
    has_groups = bool(world.d.scheduler.kv.layout.draft_groups)
    assert world.d.transfers.driver.counters.draft_groups_missing == has_groups
    assert world.d.transfers.recomputed_prompts == 0
    return "moved target"


@row("the tokens differ", "c")
def tokens_differ(world: World, phase: str) -> str:
    reach(world, "b")
    world.prompt = [*world.prompt[:-1], (world.prompt[-1] + 1) % 256]
    world.submit()
    world.finish()
    return "recompute"


@row("the tenant differs", "c")
def tenant_differs(world: World, phase: str) -> str:
    reach(world, "b")
    world.submit(salt="another tenant")
    world.finish()
    return "recompute"


@row("a ticket is used twice", "cdefg")
def used_twice(world: World, phase: str) -> str:
    reach(world, phase)
    world.d.add_request("again", world.prompt, world.params, ticket=world.ticket)
    again = world.d.output("again")
    world.link.open()
    world.finish()
    if world.policy == "fail" and phase != "g":
        assert again.error_code == "kv_transfer_failed"
    elif again.error is None:
        world.site.check_text(world.prompt, world.params, again.outputs[0].token_ids)
    return "moved"


@row("a ticket is used twice, once without need", "cdefg")
def declined_elsewhere(world: World, phase: str) -> str:
    """A request whose prompt is scored computes all of it, and declines its ticket, which another one is using."""
    reach(world, phase)
    scored = replace(world.params, prompt_logprobs=1)
    if world.policy == "fail":
        with pytest.raises(RequestError, match="prompt_logprobs"):
            world.d.add_request("again", world.prompt, scored, ticket=world.ticket)
    else:
        world.d.add_request("again", world.prompt, scored, ticket=world.ticket)
    world.turn()
    world.link.open()
    world.finish()
    return "moved"


@row("the prefill worker is at its share of held pages", "b")
def at_its_share(world: World, phase: str) -> str:
    world.new_prefill(transfer={"held_share": 1e-6})
    reach(world, "b")
    assert world.ticket is None
    if world.policy == "fail":
        with pytest.raises(RequestError, match="send it to a prefill worker first"):
            world.submit()
        world.finish()
        return "ended"
    world.submit()
    world.finish()
    return "text"


# --- the worker itself ----------------------------------------------------------------------------------


@row("the prefill worker's cache is reset", "bcdefg")
def prefill_cache_reset(world: World, phase: str) -> str:
    reach(world, phase)
    world.p.reset_prefix_cache()
    if phase == "b":
        world.submit()
    world.link.open()
    world.finish()
    return "moved"


@row("the decode worker's cache is reset", "cdefg")
def decode_cache_reset(world: World, phase: str) -> str:
    reach(world, phase)
    world.d.reset_prefix_cache()
    world.link.open()
    world.finish()
    return "moved"


def interrupted_step(where: str) -> Scenario:
    def run(world: World, phase: str) -> str:
        reach(world, phase)
        with interrupted(world.d, where):
            world.until(lambda: world.was_interrupted, 5.0)
        # Other requests of the step end with an error as well, and nothing else does.
        assert all(output.error is not None for output in world.injected)
        world.turn()
        world.link.open()
        world.finish()
        return "interrupted"

    return run


row("running a step fails", "cdefg")(interrupted_step("run"))
row("planning a step fails", "cdefg")(interrupted_step("schedule"))
row("committing a step fails", "cdefg")(interrupted_step("commit"))
row("handing a step out fails", "cdefg")(interrupted_step("after"))
