"""A scenario: all that one simulated run depends on, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.kv.archetypes import ARCHETYPES, DrafterShape
from outrider.kv.footprint import GroupSpec, KVFootprint
from outrider.kv.groups import group_kind
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.prefix import CacheIdentity, Media
from outrider.kv.retention import Retention
from outrider.kv.sizing import worst_case_pages
from outrider.scheduler import LoadFailure, RequestSpec, Role, SchedulerConfig
from outrider.transfer.records import TransferLimits

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
    """An event from outside: a request is aborted; a worker dies, stops for a while or is interrupted, or its prefix
    cache is emptied."""

    at: int
    """Tick of the event; with a phase, the number of ticks after the request has come into it."""
    kind: str
    """One of OUTSIDE_FAULTS."""
    target: str
    """The name of a request for "abort" and for every fault with a phase, else of a worker."""
    phase: str = ""
    """One of PHASES: the fault waits until the request's hand-off has come so far."""
    side: str = ""
    """One of SIDES, with a phase: which worker of the request's hand-off the fault befalls."""


@dataclass(frozen=True, kw_only=True)
class PeerDraw:
    """A worker beside the first one. Its target and drafter may have other page sizes."""

    name: str
    role: str
    """One of PEER_ROLES."""
    target_pages: tuple[int, ...]
    draft_pages: tuple[int, ...] = ()
    drafter: str = "same"
    """One of PEER_DRAFTERS, by which the worker drafts."""
    weights: str = "sim"
    """KV of other weights than its own is refused by a decode worker."""


WEIGHTS = "sim"
FIRST = "decode"
"""Name of the first worker, which every scenario has."""

OUTSIDE_FAULTS = ("abort", "death", "interrupt", "reset", "stop")
PHASES = ("queued", "held", "fetching", "waiting", "reading", "confirming", "decoding")
"""Where a hand-off stands: queued or computed at the prefill worker, held there and not claimed, asked for, waiting
for pages at the decode worker, being read, being confirmed, done."""
SIDES = ("prefill", "decode")
PHASE_FAULTS = (
    *(("abort", phase, "") for phase in PHASES),
    *((kind, phase, "prefill") for kind in ("death", "interrupt", "reset", "stop") for phase in PHASES),
    *((kind, phase, "decode") for kind in ("death", "interrupt", "reset", "stop") for phase in PHASES[2:]),
)
"""Kinds of faults with the phases and sides that they can befall. Before the prefill worker is asked, a hand-off has no
decode worker."""
PEER_ROLES = ("prefill", "decode", "both")
PEER_DRAFTERS = ("same", "other", "none")


def phase_fault(kind: str, phase: str, side: str) -> str:
    """Returns the name under which a fault of a hand-off is counted."""
    return f"{phase}: {kind} of {side} worker" if side else f"{phase}: {kind}"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    seed: int
    archetype: str
    """The way in which the drafter treats KV: a name of ARCHETYPES."""
    target: tuple[GroupDraw, ...]
    draft: tuple[GroupDraw, ...]
    peers: tuple[PeerDraw, ...] = ()
    """Workers beside the first one; none if one worker prefills and decodes."""
    first_prefills: bool = False
    """Whether the first worker computes prompts for others too, although it has peers."""
    held_share: float = 1.0
    """Share of each arena that a worker holds for others at most."""
    compare_bytes: bool = False
    """Whether both workers of a hand-off compare digests of what was read."""
    message_faults: float = 0.0
    """Probability that a control message is lost, late or duplicated."""
    ticket_faults: float = 0.0
    """Probability that the router brings a ticket late, twice, damaged, or to another prompt."""
    drafter_max_len: int | None = None
    block_sizes: tuple[int, ...] = ()
    """Least number of rows in a block, for a drafter that drafts in blocks."""
    max_model_len: int = 256
    arena_slack: float = 4.0
    """Pages beyond the largest request's worst case, as a factor of it; 0 is the tightest that can run."""
    prefix_caching: bool = True
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_chunk_tokens: int = 16
    step_in_flight: bool = False
    paced: bool = False
    """Whether each worker's scheduler chooses how much is drafted and verified, and looks drafts up."""
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
        """Whether some workers compute prompts for others."""
        return bool(self.peers)

    @property
    def limits(self) -> TransferLimits:
        """Limits of hand-offs in ticks."""
        return TransferLimits(
            lease_s=60.0,
            renew_s=10.0,
            answer_s=16.0,
            read_s=30.0,
            look_up_s=8.0,
            tier_s=30.0,
            held_share=self.held_share,
        )

    @property
    def workers(self) -> tuple[str, ...]:
        return (FIRST, *(peer.name for peer in self.peers))

    @property
    def prefillers(self) -> tuple[str, ...]:
        """Workers that prompts may be sent to for a hand-over."""
        first = (FIRST,) if self.first_prefills else ()
        return first + tuple(peer.name for peer in self.peers if peer.role != "decode")

    @property
    def decoders(self) -> tuple[str, ...]:
        return (FIRST, *(peer.name for peer in self.peers if peer.role != "prefill"))

    def peer(self, name: str) -> PeerDraw | None:
        """Returns the draw of a worker; None for the first one."""
        return next((peer for peer in self.peers if peer.name == name), None)

    def role(self, name: str) -> Role:
        peer = self.peer(name)
        if peer is None:
            return Role.DECODE if self.peers and not self.first_prefills else Role.BOTH
        return Role(peer.role)

    def footprint(self, draft: tuple[GroupDraw, ...], fingerprint: str = "sim") -> KVFootprint:
        archetype = ARCHETYPES[self.archetype]
        return archetype.declare(
            self.archetype,
            DrafterShape(
                groups=tuple(group.spec(f"draft{i}") for i, group in enumerate(draft)) if archetype.owns_kv else (),
                taps=(1, 3) if archetype.reads_taps else (),
                max_len=self.drafter_max_len,
                fingerprint=fingerprint,
                block_sizes=self.block_sizes,
            ),
        )

    def layout(self, worker: str = FIRST) -> KVLayout:
        target, draft, peer = self.target, self.draft, self.peer(worker)
        if peer is not None:
            target = tuple(replace(g, page_tokens=p) for g, p in zip(target, peer.target_pages, strict=True))
            draft = tuple(replace(g, page_tokens=p) for g, p in zip(draft, peer.draft_pages, strict=True))
        specs = tuple(group.spec(f"target{i}") for i, group in enumerate(target))
        if peer is not None and peer.drafter == "none":
            return KVLayout(target=specs)
        return KVLayout(target=specs, footprint=self.footprint(draft, _fingerprint(peer)))

    def scheduler_config(self, role: Role) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            role=role,
            step_in_flight=self.step_in_flight,
            load_failure=LoadFailure(self.load_failure),
        )

    def kv_config(self, layout: KVLayout, worker: str = FIRST) -> KVConfig:
        """Returns a configuration with memory for the largest request, and the slack on top."""
        peer = self.peer(worker)
        roomy = KVConfig(
            identity=CacheIdentity(weights=WEIGHTS if peer is None else peer.weights),
            arena_pages=(1 << 20,) * len(layout.arena_page_bytes),
            max_model_len=self.max_model_len,
            step_tokens=min(self.max_chunk_tokens, self.max_num_batched_tokens),
            steps_ahead=2 if self.step_in_flight else 1,
            prefix_caching=self.prefix_caching,
            retention=Retention.of(self.retention),
            keep_margin=layout.margin if worker in self.prefillers else 0,
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
                length = self._total_tokens(request) + 2 * request.k + 8 + max(self.block_sizes, default=0)
                pages[layout.arena_of[group]] += -(-length // spec.page_tokens) + 2
        return tuple(pages)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _fingerprint(peer: PeerDraw | None) -> str:
    return "other" if peer is not None and peer.drafter == "other" else "sim"
