"""How a scenario is drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from outrider.kv.archetypes import ARCHETYPES
from outrider.tools.sim.plain import LARGEST
from outrider.tools.sim.scenario import (
    PHASE_FAULTS,
    WEIGHTS,
    FaultDraw,
    GroupDraw,
    PeerDraw,
    RequestDraw,
    Scenario,
)

PAGE_SIZES = (1, 2, 3, 4, 5, 8, 16)
WINDOWS = (1, 2, 3, 5, 7, 8, 9, 16, 31)
PACED = 0.35
"""Part of the scenarios in which schedulers choose how much to speculate."""
EQUAL_PAGE_BYTES = 240
"""Divisible by every page size, so that groups of any page size can share an arena."""


@dataclass
class Drawing:
    """Draws one scenario. Every choice is a small method, so that the space is easy to see."""

    random: Random
    seed: int
    one_arena: bool = field(init=False)

    def __post_init__(self) -> None:
        self.one_arena = self.random.random() < 0.5

    def scenario(self) -> Scenario:
        r = self.random
        archetype = r.choice(list(ARCHETYPES))
        split = r.random() < 0.3
        target = self.target_groups()
        owns_kv = ARCHETYPES[archetype].owns_kv
        draft = tuple(self.group(r.random() < 0.3) for _ in range(r.choice((1, 1, 2)))) if owns_kv else ()
        one_by_one = not split and r.random() < 0.1
        requests = self.requests(one_by_one)
        max_num_seqs = r.randint(1, 6)
        horizon = 60
        return Scenario(
            seed=self.seed,
            archetype=archetype,
            target=target,
            draft=draft,
            peers=self.prefill_worker(target, draft, split),
            drafter_max_len=r.choice((None, None, None, r.randint(8, 70))),
            max_model_len=r.choice((256, 256, r.randint(40, 90))),
            arena_slack=20.0 if one_by_one else r.choice((0.0, 0.0, 0.25, 1.0, 4.0)),
            prefix_caching=r.random() < 0.93,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + r.choice((1, 3, 8, 24, 64)),
            max_chunk_tokens=r.choice((1, 3, 7, 16, 64)),
            step_in_flight=r.random() < 0.5,
            acceptance=r.choice((0.0, 0.3, 0.6, 0.8, 0.95, 1.0)),
            vocabulary=r.choice((12, 30, 60)),
            load_failure=r.choice(("recompute", "recompute", "fail")),
            transfer_faults=r.choice((0.0, 0.3, 0.6)),
            tier_probability=r.choice((0.0, 0.0, 0.5, 1.0)) if not split and not one_by_one else 0.0,
            one_by_one=one_by_one,
            requests=requests,
            faults=() if one_by_one else self.outside_faults(requests, split, horizon),
        )

    def prefill_worker(
        self, target: tuple[GroupDraw, ...], draft: tuple[GroupDraw, ...], split: bool
    ) -> tuple[PeerDraw, ...]:
        r = self.random
        target_pages = tuple(r.choice((g.page_tokens, r.choice(PAGE_SIZES))) for g in target) if split else ()
        draft_pages = tuple(r.choice((g.page_tokens, r.choice(PAGE_SIZES))) for g in draft) if split else ()
        drafter = "same" if r.random() < 0.85 else "none"
        peer = PeerDraw(
            name="prefill", role="prefill", target_pages=target_pages, draft_pages=draft_pages, drafter=drafter
        )
        return (peer,) if split else ()

    def target_groups(self) -> tuple[GroupDraw, ...]:
        shape = self.random.choice(("f", "f", "s", "fs", "fs", "fss", "ss", "ff"))
        return tuple(self.group(letter == "s") for letter in shape)

    def group(self, sliding: bool) -> GroupDraw:
        r = self.random
        page_tokens = r.choice(PAGE_SIZES)
        slot_bytes = EQUAL_PAGE_BYTES // page_tokens if self.one_arena else r.choice((1, 2))
        return GroupDraw(page_tokens=page_tokens, slot_bytes=slot_bytes, window=r.choice(WINDOWS) if sliding else 0)

    def requests(self, one_by_one: bool) -> tuple[RequestDraw, ...]:
        r = self.random
        stems = [tuple(r.randrange(1, 12) for _ in range(r.randint(4, 48))) for _ in range(2)]
        k = r.choice((0, 1, 2, 3, 4, 6))
        out = []
        for number in range(r.randint(3, 9)):
            stem = r.choice(stems)
            prompt = stem[: r.choice((len(stem), r.randint(0, len(stem))))]
            prompt += tuple(r.randrange(1, 12) for _ in range(r.choice((0, 0, 1, r.randint(1, 20)))))
            prompt = prompt[:60] or (1,)
            out.append(
                RequestDraw(
                    id=f"r{number}",
                    prompt=prompt[: r.choice((39, 39, 60))],
                    max_tokens=r.choice((1, 2, r.randint(3, 30))),
                    k=r.choice((k, k, k, 0, r.randint(0, 5))),
                    at=number if one_by_one else r.choice((0, r.randint(0, 40))),
                    priority=r.choice((0, 0, 0, 1, 2)),
                    n=1 if one_by_one else r.choice((1, 1, 1, 1, 2, 3)),
                    salt=r.choice(("", "", "", "other")),
                    stops=r.random() < 0.7,
                    use_cache=r.random() < 0.95,
                )
            )
        return tuple(out)

    def outside_faults(self, requests: tuple[RequestDraw, ...], split: bool, horizon: int) -> tuple[FaultDraw, ...]:
        r = self.random
        faults = [
            FaultDraw(at=r.randint(0, horizon), kind="abort", target=request.id)
            for request in requests
            if r.random() < 0.15
        ]
        workers = ("prefill", "decode") if split else ("decode",)
        faults += [
            FaultDraw(at=r.randint(1, horizon), kind="death", target=worker) for worker in workers if r.random() < 0.12
        ]
        return tuple(faults)


def with_extras(scenario: Scenario, random: Random) -> Scenario:
    """Add what is drawn apart from the rest, so that a new kind of event leaves older scenarios as they were."""
    faults = scenario.faults
    if not scenario.one_by_one and random.random() < (0.5 if scenario.tier_probability else 0.05):
        # With a second tier everything is loaded back from there.
        faults += (FaultDraw(at=random.randint(5, 40), kind="reset", target="decode"),)
    requests = scenario.requests
    if random.random() < 0.25:
        requests = tuple(replace(request, adapter=random.choice(("", "", "formal"))) for request in requests)
    if random.random() < 0.3:
        requests = with_media(requests, random)
    if scenario.draft and not scenario.one_by_one and random.random() < 0.1:
        scenario, requests = squeezed(scenario, requests, random)
    peers = scenario.peers
    if scenario.split and random.random() < 0.05:
        peers = (replace(peers[0], weights="another"),)
    block_sizes = random.choice(((), (2,), (5,), (4, 8))) if scenario.draft else ()
    scenario = replace(scenario, requests=requests, faults=faults, peers=peers, block_sizes=block_sizes)
    if random.random() < 0.15:
        scenario = large_beside_small(scenario, random)
    scenario = with_retention(scenario, random)
    if not scenario.split and not scenario.one_by_one and random.random() < 0.12:
        scenario = loading_under_pressure(scenario, random)
    return with_interruptions(scenario, random)


def with_interruptions(scenario: Scenario, random: Random) -> Scenario:
    """Now and then a worker's step is interrupted after it was planned."""
    if scenario.one_by_one or random.random() > 0.15:
        return scenario
    workers = ("prefill", "decode") if scenario.split else ("decode",)
    faults = [
        FaultDraw(at=random.randint(1, 40), kind="interrupt", target=random.choice(workers))
        for _ in range(random.choice((1, 2, 3)))
    ]
    return replace(scenario, faults=(*scenario.faults, *faults))


def loading_under_pressure(scenario: Scenario, random: Random) -> Scenario:
    """Tiers serve many loads, some of which fail, while pages are short and texts are long: requests are preempted
    while others load. The drafter has a window of its own."""
    archetype = random.choice([name for name, archetype in ARCHETYPES.items() if archetype.owns_kv])
    page_tokens, window = random.choice((1, 2, 4)), random.choice((3, 5, 8, 16))
    draft = (GroupDraw(page_tokens=page_tokens, slot_bytes=EQUAL_PAGE_BYTES // page_tokens, window=window),)
    requests = tuple(
        replace(request, k=3, max_tokens=random.randint(12, 30), at=random.randint(0, 60), use_cache=True, stops=False)
        for request in scenario.requests
    )
    resets = tuple(FaultDraw(at=at, kind="reset", target="decode") for at in (12, 24, 36, 48))
    return replace(
        scenario,
        archetype=archetype,
        draft=draft,
        requests=requests,
        faults=scenario.faults + resets,
        prefix_caching=True,
        arena_slack=random.choice((0.0, 0.25)),
        max_num_seqs=5,
        max_num_batched_tokens=random.choice((9, 29, 69)),
        load_failure="recompute",
        transfer_faults=random.choice((0.3, 0.6)),
        tier_probability=1.0,
        tier_retention="dense",
    )


def large_beside_small(scenario: Scenario, random: Random) -> Scenario:
    """Give the target a full group with large pages and a sliding one with small pages, so that hits are kept for few
    boundaries, and the drafter a sliding group."""
    small = random.choice((1, 2, 4))
    target = (
        GroupDraw(page_tokens=random.choice((8, 16)), slot_bytes=1),
        GroupDraw(page_tokens=small, slot_bytes=4, window=random.choice((3, 5, 8, 9))),
    )
    draft = (GroupDraw(page_tokens=small, slot_bytes=4, window=random.choice((3, 5, 8))),) if scenario.draft else ()
    peers = []
    for peer in scenario.peers:
        target_pages = tuple(random.choice((g.page_tokens, g.page_tokens * 2)) for g in target)
        draft_pages = tuple(random.choice((g.page_tokens, 3)) for g in draft)
        peers.append(replace(peer, target_pages=target_pages, draft_pages=draft_pages))
    return replace(scenario, target=target, draft=draft, peers=tuple(peers))


RETENTIONS = ("dense", "dense", "tail", "tail", "5", "24")


def with_retention(scenario: Scenario, random: Random) -> Scenario:
    """Draw a retention policy for every tier, and now and then a host tier."""
    alone = not scenario.split and not scenario.one_by_one
    host_probability = random.choice((0.0, 0.0, 0.0, 0.6, 1.0)) if alone else 0.0
    device, remote, host = (random.choice(RETENTIONS) for _ in range(3))
    return replace(
        scenario, host_probability=host_probability, retention=device, tier_retention=remote, host_retention=host
    )


def squeezed(
    scenario: Scenario, requests: tuple[RequestDraw, ...], random: Random
) -> tuple[Scenario, tuple[RequestDraw, ...]]:
    """Draw long drafts on too few small pages, so that drafters are dropped while their requests decode."""
    target = []
    for group in scenario.target:
        page_tokens = random.choice((2, 3, 4))
        equal = group.page_tokens * group.slot_bytes == EQUAL_PAGE_BYTES
        slot_bytes = EQUAL_PAGE_BYTES // page_tokens if equal else group.slot_bytes
        target.append(replace(group, page_tokens=page_tokens, slot_bytes=slot_bytes))
    requests = tuple(replace(r, k=random.choice((4, 6)), max_tokens=random.randint(12, 30)) for r in requests)
    return replace(scenario, target=tuple(target), arena_slack=random.choice((0.0, 0.25))), requests


def with_hand_offs(scenario: Scenario, random: Random) -> Scenario:
    """Draw more workers, and what goes wrong between them. Some scenarios aim at one phase of hand-offs."""
    r = random
    scenario = replace(
        scenario,
        peers=_more_peers(scenario, r),
        first_prefills=r.random() < 0.15,
        held_share=r.choice((0.25, 0.5, 1.0, 1.0)),
        compare_bytes=r.random() < 0.5,
        message_faults=r.choice((0.0, 0.0, 0.1, 0.3)),
        ticket_faults=r.choice((0.0, 0.0, 0.2, 0.5)),
        arena_slack=r.choice((scenario.arena_slack, scenario.arena_slack, 1.0, 4.0)),
    )
    if r.random() < 0.3:
        # Some requests come when their workers have long met, died and come back.
        late = tuple(replace(request, at=r.choice((request.at, r.randint(40, 200)))) for request in scenario.requests)
        scenario = replace(scenario, requests=late)
    if scenario.ticket_faults and r.random() < 0.5:
        # A ticket can only be taken for another prompt's if both are equally long.
        length = max(4, min(len(request.prompt) for request in scenario.requests))
        scenario = replace(
            scenario, requests=tuple(request.with_prompt(request.prompt[:length]) for request in scenario.requests)
        )
    faults = scenario.faults
    for name in scenario.workers:
        if r.random() < 0.1:
            faults += (FaultDraw(at=r.randint(1, 80), kind="stop", target=name),)
    for kind, phase, side in _phase_faults(r, r.choice((0, 0, 1, 4, 7))):
        target = r.choice(scenario.requests).id
        faults += (FaultDraw(at=r.choice((0, 0, 0, 1, 2, 4)), kind=kind, target=target, phase=phase, side=side),)
    scenario = replace(scenario, faults=faults)
    if r.random() < 0.1:
        scenario = replace(scenario, host_probability=r.choice((0.5, 1.0)))
    aim = r.random()
    if aim < 0.08:
        return leaving_while_loading(scenario, r)
    return waiting_for_pages(scenario, r) if aim < 0.33 else scenario


def leaving_while_loading(scenario: Scenario, random: Random) -> Scenario:
    """Prompts that share most of a page with what their decode worker has cached, so that a page is copied while the
    rest of it is read, and clients some of which leave just then."""
    stem = max((request.prompt for request in scenario.requests), key=len)
    requests = tuple(
        replace(
            request.with_prompt(stem[: max(1, len(stem) - random.randint(0, 5))] + (number % 11 + 1,)),
            at=random.randint(0, 10) + 12 * number,
            salt="",
            adapter="",
            media=(),
            use_cache=True,
        )
        for number, request in enumerate(scenario.requests)
    )
    leaving = [request for request in requests[1:] if random.random() < 0.6]
    faults = tuple(FaultDraw(at=0, kind="abort", target=request.id, phase="reading") for request in leaving)
    return replace(
        scenario,
        peers=tuple(peer for peer in scenario.peers if peer.role == "prefill"),
        first_prefills=False,
        prefix_caching=True,
        step_in_flight=True,
        arena_slack=4.0,
        held_share=1.0,
        message_faults=0.0,
        requests=requests,
        faults=faults,
    )


def _phase_faults(random: Random, count: int) -> list[tuple[str, str, str]]:
    """Draw faults of hand-offs; the phases that pass most quickly come most often."""
    weights = {"queued": 1, "held": 2, "fetching": 2, "waiting": 3, "reading": 3, "confirming": 5, "decoding": 2}
    return random.choices(PHASE_FAULTS, [weights[phase] for _kind, phase, _side in PHASE_FAULTS], k=count)


def waiting_for_pages(scenario: Scenario, random: Random) -> Scenario:
    """One decode worker that runs few requests at a time, with long texts: others wait for it with their leases."""
    requests = tuple(
        replace(request, max_tokens=random.randint(12, 30), at=random.randint(0, 20), stops=False)
        for request in scenario.requests
    )
    faults = tuple(fault for fault in scenario.faults if fault.phase)
    for kind, phase, side in _phase_faults(random, 3):
        target = random.choice(requests).id
        faults += (FaultDraw(at=random.choice((0, 1, 4)), kind=kind, target=target, phase=phase, side=side),)
    if random.random() < 0.3:
        # Some leases run out while their reader is stopped, and the pages are soon used again.
        for request in requests:
            faults += (FaultDraw(at=0, kind="stop", target=request.id, phase="waiting", side="decode"),)
    return replace(
        scenario,
        peers=tuple(peer for peer in scenario.peers if peer.role == "prefill"),
        first_prefills=False,
        requests=requests,
        faults=faults,
        max_num_seqs=random.choice((1, 2)),
        max_num_batched_tokens=max(3, scenario.max_num_batched_tokens),
        arena_slack=random.choice((0.25, 1.0, 4.0)),
        held_share=1.0,
    )


def _more_peers(scenario: Scenario, r: Random) -> tuple[PeerDraw, ...]:
    """Returns one to three prefill workers and up to two more decode workers."""
    (first,) = scenario.peers
    roles = ["prefill"] * r.choice((0, 0, 1, 2)) + ["decode"] * r.choice((0, 0, 1, 2))
    peers = [replace(first, drafter="other") if scenario.draft and r.random() < 0.07 else first]
    for number, role in enumerate(roles, start=2):
        odd = r.random()
        peers.append(
            PeerDraw(
                name=f"{role}{number}",
                role="both" if r.random() < 0.15 else role,
                target_pages=tuple(r.choice((g.page_tokens, r.choice(PAGE_SIZES))) for g in scenario.target),
                draft_pages=tuple(r.choice((g.page_tokens, r.choice(PAGE_SIZES))) for g in scenario.draft),
                drafter="none" if odd < 0.1 else "other" if odd < 0.2 else "same",
                weights="another" if r.random() < 0.04 else WEIGHTS,
            )
        )
    return tuple(peers)


PLACEHOLDER = 9
"""The token id at every media position, so that only the content tells media apart."""


def with_media(requests: tuple[RequestDraw, ...], random: Random) -> tuple[RequestDraw, ...]:
    """Put media into all prompts at the same places, so that prompts which share them share their pages."""
    places, start = [], 0
    for _ in range(random.choice((1, 1, 2, 3))):
        start += random.randint(0, 9)
        end = start + random.choice((1, 2, 5, 9))
        places.append((start, end))
        start = end
    out = []
    for request in requests:
        prompt = list(request.prompt)
        for start, end in places:
            prompt[start:end] = [PLACEHOLDER] * len(prompt[start:end])
        media = tuple((start, end, random.choice(("cat", "cat", "dog"))) for start, end in places)
        out.append(replace(request, media=media).with_prompt(tuple(prompt)))
    return tuple(out)


def draw(seed: int, index: int) -> Scenario:
    """Returns scenario number `index` of a seed."""
    name = f"outrider:{seed}:{index}"
    scenario = Drawing(Random(name), seed=(seed * 1_000_003 + index) % (LARGEST + 1)).scenario()
    scenario = with_extras(scenario, Random(f"{name}:extras"))
    if scenario.split:
        scenario = with_hand_offs(scenario, Random(f"{name}:hand-offs"))
    return replace(scenario, paced=Random(f"{name}:pace").random() < PACED)
