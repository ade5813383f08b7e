"""A scenario: all that one simulated run depends on, as plain data, and how one is drawn from a seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from outrider.kv.archetypes import ARCHETYPES, DrafterShape
from outrider.kv.footprint import GroupSpec, KVFootprint
from outrider.kv.groups import group_kind
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.prefix import CacheIdentity, Media
from outrider.kv.retention import Retention
from outrider.kv.sizing import worst_case_pages
from outrider.scheduler import LoadFailure, RequestSpec, Role, SchedulerConfig
from outrider.tools.sim.plain import LARGEST

STOP_TOKENS = frozenset({0})


@dataclass(frozen=True, kw_only=True)
class GroupDraw:
    """One KV group: a window of 0 means full attention."""

    page_tokens: int
    slot_bytes: int
    window: int = 0

    def spec(self, name: str) -> GroupSpec:
        kind = group_kind("sliding", {"window": self.window}) if self.window else group_kind("full", {})
        return GroupSpec(name=name, kind=kind, page_tokens=self.page_tokens, slot_bytes=self.slot_bytes)


@dataclass(frozen=True, kw_only=True)
class RequestDraw:
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    k: int
    at: int = 0
    priority: int = 0
    n: int = 1
    salt: str = ""
    adapter: str = ""
    media: tuple[tuple[int, int, str], ...] = ()
    """(start, end, what is shown there), in order and apart from each other."""
    stops: bool = True
    use_cache: bool = True

    @property
    def items(self) -> tuple[Media, ...]:
        return tuple(Media(start, end, shown.encode()) for start, end, shown in self.media)

    @property
    def fork_ids(self) -> tuple[str, ...]:
        """Ids of the continuations after the first."""
        return tuple(f"{self.id}#{index}" for index in range(1, self.n))

    def spec(self, **others: Any) -> RequestSpec:
        """Returns the request as a worker receives it; `others` are fields that depend on the worker."""
        fields: dict[str, Any] = {
            "id": self.id,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "k": self.k,
            "priority": self.priority,
            "sequence_ids": (self.id, *self.fork_ids),
            "salt": self.salt,
            "adapter": self.adapter,
            "media": self.items,
            "stop_tokens": STOP_TOKENS if self.stops else frozenset(),
            "use_cache": self.use_cache,
        }
        return RequestSpec(**(fields | others))

    def with_prompt(self, prompt: tuple[int, ...]) -> RequestDraw:
        """Returns the request with a shorter prompt, without media past its end."""
        kept = tuple((s, min(e, len(prompt)), shown) for s, e, shown in self.media if s < len(prompt))
        return replace(self, prompt=prompt, media=kept)


@dataclass(frozen=True, kw_only=True)
class FaultDraw:
    """An event from outside: a request is aborted, a worker dies or is interrupted, or its prefix cache is emptied."""

    at: int
    kind: str
    """One of OUTSIDE_FAULTS."""
    target: str
    """The name of a request for "abort", else of a worker."""


WEIGHTS = "sim"

OUTSIDE_FAULTS = ("abort", "death", "interrupt", "reset")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    seed: int
    archetype: str
    """The way in which the drafter treats KV: a name of ARCHETYPES."""
    target: tuple[GroupDraw, ...]
    draft: tuple[GroupDraw, ...]
    peer_target_pages: tuple[int, ...] = ()
    """Page sizes of the prefill worker's target groups; empty if one worker prefills and decodes."""
    peer_draft_pages: tuple[int, ...] = ()
    peer_drafts: bool = True
    peer_weights: str = WEIGHTS
    """The weights of the prefill worker; a decode worker refuses KV of other weights than its own."""
    drafter_max_len: int | None = None
    block_rows: int = 0
    """Least number of rows in a block, for a drafter that drafts in blocks."""
    max_model_len: int = 256
    arena_slack: float = 4.0
    """Pages beyond the largest request's worst case, as a factor of it; 0 is the tightest that can run."""
    prefix_caching: bool = True
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_chunk_tokens: int = 16
    step_in_flight: bool = False
    acceptance: float = 0.7
    vocabulary: int = 30
    load_failure: str = "recompute"
    transfer_faults: float = 0.0
    tier_probability: float = 0.0
    """Probability that a remote tier takes over a published page; 0 means that there is no such tier."""
    host_probability: float = 0.0
    """Probability that a host tier, which dies with its worker, takes over a published page."""
    retention: str = "dense"
    """What the device keeps of groups with a window, written like the setting kv_retention; further tiers have their
    own policies."""
    tier_retention: str = "dense"
    host_retention: str = "dense"
    one_by_one: bool = False
    requests: tuple[RequestDraw, ...] = ()
    faults: tuple[FaultDraw, ...] = ()

    @property
    def split(self) -> bool:
        """Whether there is a prefill worker beside the decode worker."""
        return bool(self.peer_target_pages)

    def footprint(self, draft: tuple[GroupDraw, ...]) -> KVFootprint:
        archetype = ARCHETYPES[self.archetype]
        return archetype.declare(
            self.archetype,
            DrafterShape(
                groups=tuple(group.spec(f"draft{i}") for i, group in enumerate(draft)) if archetype.owns_kv else (),
                taps=(1, 3) if archetype.reads_taps else (),
                max_len=self.drafter_max_len,
                fingerprint="sim",
                block_rows=self.block_rows,
            ),
        )

    def layout(self, *, peer: bool = False) -> KVLayout:
        target, draft = self.target, self.draft
        if peer:
            target = tuple(replace(g, page_tokens=p) for g, p in zip(target, self.peer_target_pages, strict=True))
            draft = tuple(replace(g, page_tokens=p) for g, p in zip(draft, self.peer_draft_pages, strict=True))
        specs = tuple(group.spec(f"target{i}") for i, group in enumerate(target))
        if peer and not self.peer_drafts:
            return KVLayout(target=specs)
        return KVLayout(target=specs, footprint=self.footprint(draft))

    def scheduler_config(self, role: Role) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            role=role,
            step_in_flight=self.step_in_flight,
            load_failure=LoadFailure(self.load_failure),
        )

    def kv_config(self, layout: KVLayout, *, peer: bool = False) -> KVConfig:
        """Returns a configuration with memory for the largest request, and the slack on top."""
        roomy = KVConfig(
            identity=CacheIdentity(weights=self.peer_weights if peer else WEIGHTS),
            arena_pages=(1 << 20,) * len(layout.arena_page_bytes),
            max_model_len=self.max_model_len,
            step_tokens=min(self.max_chunk_tokens, self.max_num_batched_tokens),
            steps_ahead=2 if self.step_in_flight else 1,
            prefix_caching=self.prefix_caching,
            retention=Retention.of(self.retention),
            keep_margin=layout.margin if peer else 0,
        )
        if self.one_by_one:
            return replace(roomy, arena_pages=self._ample_pages(layout))
        pages = [1] * len(layout.arena_page_bytes)
        for request in self.requests:
            total = self._total_tokens(request)
            target = worst_case_pages(layout, roomy, total, request.k, draft=False)
            both = worst_case_pages(layout, roomy, total, request.k, draft=True)
            # An arena that only drafts use is sized for them; elsewhere drafts must make do with the slack.
            pages = [max(a, t or d) for a, t, d in zip(pages, target, both, strict=True)]
        return replace(roomy, arena_pages=tuple(int(p * (1 + self.arena_slack)) + 1 for p in pages))

    def _total_tokens(self, request: RequestDraw) -> int:
        return min(len(request.prompt) + request.max_tokens, self.max_model_len)

    def _ample_pages(self, layout: KVLayout) -> tuple[int, ...]:
        """Returns enough pages that nothing is ever evicted: for all slots of all requests, scratch and copies."""
        pages = [2] * len(layout.arena_page_bytes)
        for request in self.requests:
            for group, spec in enumerate(layout.groups):
                length = self._total_tokens(request) + 2 * request.k + 8 + self.block_rows
                pages[layout.arena_of[group]] += -(-length // spec.page_tokens) + 2
        return tuple(pages)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


PAGE_SIZES = (1, 2, 3, 4, 5, 8, 16)
WINDOWS = (1, 2, 3, 5, 7, 8, 9, 16, 31)
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
            peer_target_pages=tuple(r.choice((g.page_tokens, r.choice(PAGE_SIZES))) for g in target) if split else (),
            peer_draft_pages=tuple(r.choice((g.page_tokens, r.choice(PAGE_SIZES))) for g in draft) if split else (),
            peer_drafts=r.random() < 0.85,
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
    peer_weights = "another" if scenario.split and random.random() < 0.05 else WEIGHTS
    block_rows = random.choice((0, 2, 5, 8)) if scenario.draft else 0
    scenario = replace(scenario, requests=requests, faults=faults, peer_weights=peer_weights, block_rows=block_rows)
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
    peer: dict[str, Any] = {}
    if scenario.split:
        peer["peer_target_pages"] = tuple(random.choice((g.page_tokens, g.page_tokens * 2)) for g in target)
        peer["peer_draft_pages"] = tuple(random.choice((g.page_tokens, 3)) for g in draft)
    return replace(scenario, target=target, draft=draft, **peer)


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
    scenario = Drawing(Random(f"outrider:{seed}:{index}"), seed=(seed * 1_000_003 + index) % (LARGEST + 1)).scenario()
    return with_extras(scenario, Random(f"outrider:{seed}:{index}:extras"))
