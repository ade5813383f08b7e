"""Prefill workers of the cluster that lie: what they say is refused, nothing is loaded, and other requests go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.transfer.faults.rows import reach
from tests.transfer.faults.world import Shape, Site, World, turned_clock

from outrider.sampling import SamplingParams
from outrider.transfer.links.memory import MemoryMap
from outrider.transfer.messages import Confirmed, Message, Offered, Refused, ScoredToken, Welcome

HUGE = (1 << 63) - 1


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(Shape("eagle3", "mixed", 8, 16), tmp_path_factory.mktemp("liars"))


@pytest.fixture(params=["recompute", "fail"])
def world(site: Site, request: pytest.FixtureRequest) -> Iterator[World]:
    with turned_clock() as clock:
        made = World(site, request.param, 2, clock)
        made.params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
        yield made
        made.close()


def lie(world: World, kind: type[Message], change: Callable[[Any], Message], expects: str = "recompute") -> None:
    """Run a request whose prefill worker changes its messages of one kind."""
    world.start_decode()
    world.start_bystanders()
    world.link.rules.tampers = lambda message: change(message) if isinstance(message, kind) else message
    reach(world, "b")
    world.submit()
    world.finish()
    world.check(expects)
    world.check_pages()


def parts(**fields: Any) -> Callable[[Offered], Offered]:
    """A lie about every group of an offer."""
    return lambda offered: replace(offered, groups=[replace(group, **fields) for group in offered.groups])


@pytest.mark.parametrize(
    "change",
    [
        parts(group=-1),
        parts(group=HUGE),
        parts(start=-8),
        parts(start=HUGE - 1, end=HUGE, page_tokens=1),
        parts(end=HUGE),
        parts(end=0),
        parts(start=40, end=8),
        parts(page_tokens=0),
        parts(page_tokens=-8),
        parts(page_tokens=1),
        parts(pages=[]),
        parts(pages=[0] * 64),
        parts(pages=[-1] * 64),
        parts(pages=[HUGE] * 64),
        parts(pages=[(1 << 32) - 1] * 64),
        lambda offered: replace(offered, groups=[]),
        lambda offered: replace(offered, groups=offered.groups[:1]),
        lambda offered: replace(offered, num_tokens=0),
        lambda offered: replace(offered, num_tokens=HUGE),
        lambda offered: replace(offered, num_tokens=offered.num_tokens - 1),
        lambda offered: replace(offered, binding=bytes(16)),
        lambda offered: replace(offered, binding=b""),
        lambda offered: replace(offered, engine="another"),
        lambda offered: replace(offered, first_token=-1),
        lambda offered: replace(offered, first_token=256),
        lambda offered: replace(offered, first_token=HUGE),
        lambda offered: replace(offered, drafts=[256]),
        lambda offered: replace(offered, drafts=[-1]),
        lambda offered: replace(offered, drafts_worth_asking=-1),
        lambda offered: replace(offered, drafts_worth_asking=HUGE),
        lambda offered: replace(offered, logprobs=ScoredToken(token=-1, logprob=0.0, rank=1, top=())),
        lambda offered: replace(offered, logprobs=ScoredToken(token=HUGE, logprob=0.0, rank=1, top=())),
        lambda offered: replace(offered, logprobs=ScoredToken(token=1, logprob=0.0, rank=1, top=((HUGE, 0.0),))),
        lambda offered: replace(offered, logprobs=ScoredToken(token=1, logprob=float("nan"), rank=1, top=())),
    ],
)
def test_an_offer_that_lies_is_refused(world: World, change: Callable[[Offered], Offered]) -> None:
    lie(world, Offered, change)


@pytest.mark.parametrize(
    "change",
    [
        # More drafts than this worker verifies are cut, and seeds are any words.
        lambda offered: replace(offered, drafts=[1] * 200),
        lambda offered: replace(offered, drafts_worth_asking=(1 << 32) - 1),
        lambda offered: replace(offered, seed=-HUGE),
    ],
)
def test_what_is_merely_odd_does_no_harm(world: World, change: Callable[[Offered], Offered]) -> None:
    lie(world, Offered, change, "moved")


def of_memory(change: Callable[[MemoryMap], MemoryMap]) -> Callable[[Welcome], Welcome]:
    def changed(welcome: Welcome) -> Welcome:
        memory = msgspec.msgpack.decode(welcome.introduction, type=MemoryMap)
        return replace(welcome, introduction=msgspec.msgpack.encode(change(memory)))

    return changed


def arenas(**fields: int) -> Callable[[Welcome], Welcome]:
    return of_memory(lambda memory: replace(memory, arenas=[replace(arena, **fields) for arena in memory.arenas]))


def groups(**fields: int) -> Callable[[Welcome], Welcome]:
    return of_memory(lambda memory: replace(memory, groups=[replace(group, **fields) for group in memory.groups]))


def signatures(**fields: Any) -> Callable[[Welcome], Welcome]:
    return lambda welcome: replace(welcome, signatures=[replace(each, **fields) for each in welcome.signatures])


@pytest.mark.parametrize(
    "change",
    [
        arenas(base=-1),
        arenas(base=HUGE),
        arenas(page_bytes=-64),
        arenas(page_bytes=HUGE),
        arenas(num_pages=-1),
        arenas(num_pages=0),
        arenas(num_pages=HUGE),
        groups(arena=-1),
        groups(arena=99),
        groups(planes=0),
        groups(planes=-2),
        groups(planes=HUGE),
        groups(page_tokens=0),
        groups(page_tokens=HUGE),
        groups(plane_slot_bytes=1),
        groups(plane_slot_bytes=-1),
        groups(plane_slot_bytes=HUGE),
        of_memory(lambda memory: MemoryMap(arenas=[], groups=[])),
        of_memory(lambda memory: replace(memory, groups=[])),
        of_memory(lambda memory: replace(memory, groups=memory.groups[:1])),
        of_memory(lambda memory: replace(memory, arenas=[])),
        lambda welcome: replace(welcome, introduction=b""),
        lambda welcome: replace(welcome, introduction=b"\x91" * 4000),
        lambda welcome: replace(welcome, signatures=[]),
        lambda welcome: replace(welcome, signatures=welcome.signatures[1:]),
        signatures(identity="other weights"),
        signatures(slot_bytes=-1),
        signatures(reach=HUGE),
        signatures(name="another"),
        signatures(kind="sliding(1)"),
        lambda welcome: replace(welcome, engine=""),
        lambda welcome: replace(welcome, engine="another"),
        lambda welcome: replace(welcome, lease_s=0.0),
        lambda welcome: replace(welcome, lease_s=-1.0),
        lambda welcome: replace(welcome, lease_s=float("nan")),
    ],
)
def test_a_welcome_that_lies_is_refused(world: World, change: Callable[[Welcome], Welcome]) -> None:
    lie(world, Welcome, change)


@pytest.mark.parametrize("lease_s", [1e-300, float("inf")])
def test_leases_of_any_length_are_renewed_in_bounded_number(world: World, lease_s: float) -> None:
    lie(world, Welcome, lambda welcome: replace(welcome, lease_s=lease_s), "moved")


def test_a_confirmation_that_is_no_confirmation_loads_nothing(world: World) -> None:
    lie(world, Confirmed, lambda confirmed: replace(confirmed, held=False))


def test_digests_that_were_asked_for_and_do_not_come_load_nothing(world: World) -> None:
    """With byte checks on, a peer cannot avoid them by leaving its digests out."""
    lie(world, Confirmed, lambda confirmed: replace(confirmed, digests=[]))


def test_a_peer_that_refuses_everything_later_disturbs_nothing(world: World) -> None:
    """A refusal where nothing was asked is ignored."""
    lie(world, Confirmed, lambda confirmed: confirmed, "moved")
    endpoint = world.endpoint
    for message in (
        Refused(reason="all of it"),
        Refused(lease=bytes(16), reason="nothing"),
        Refused(lease=b"", reason="x" * 100_000),
        Confirmed(lease=bytes(16), question=1, held=True),
        Confirmed(lease=b"short", question=1, held=True),
    ):
        world.link._receive(endpoint, message)
    world.turn()
    world.check_pages()
