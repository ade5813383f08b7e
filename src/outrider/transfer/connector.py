"""The logic of a hand-off from a prefill worker (P) to a decode worker (D), without a transport.

    P: prefill ─▶ Lease + Offer ─────────────────────────────┐          (pages held while the lease runs)
    D: admit ─▶ loads ─▶ plan_pull(load, offer) ─▶ copy slots ─▶ ask P: did the lease hold? ─▶ import

Both sides speak in token intervals per group. A group is recognised by its signature, which leaves the
page size out: page sizes may differ, weights and layouts may not.

An offer comes from another machine: everything in it is checked when it is made, and TransferError says what
is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.errors import TransferError
from outrider.kv.checked import checked_interval, is_word, whole_number
from outrider.kv.intervals import Interval, SlotRun, pages_under, pair
from outrider.kv.layout import KVLayout
from outrider.kv.ledger import Load
from outrider.kv.pages import NULL_PAGE
from outrider.kv.prefix import CacheIdentity


class GroupSignature(NamedTuple):
    """The properties that must be equal for slots of two groups to be interchangeable."""

    name: str
    kind: str
    slot_bytes: int
    reach: int
    owner: str
    identity: str
    """The weights, dtype and layout that the bytes come from, and the part of them that this rank holds."""


def signatures(layout: KVLayout, identity: CacheIdentity) -> tuple[GroupSignature, ...]:
    footprint = layout.footprint
    drafter = f"{footprint.fingerprint}:{footprint.taps}"
    return tuple(
        GroupSignature(
            group.name,
            group.kind.label,
            group.slot_bytes,
            layout.reach[number],
            "target" if number < layout.num_target else drafter,
            identity.label,
        )
        for number, group in enumerate(layout.groups)
    )


class OfferedGroup(NamedTuple):
    """Durable slots that a prefill worker offers of one group. `pages` is indexed by page number."""

    interval: Interval
    pages: tuple[int, ...]
    page_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a prefill worker holds for a request: its tokens, and slots per group."""

    engine: str
    """An id that is new at each start of the worker, so that a restarted peer is never mistaken for the old one."""
    request: str
    lease: int
    tokens: tuple[int, ...]
    groups: Mapping[GroupSignature, OfferedGroup]

    def __post_init__(self) -> None:
        for name in ("engine", "request"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise TransferError(
                    f"an offer names its {name}, got {getattr(self, name)!r}; run the same version on both workers"
                )
        whole_number(self.lease, f"{self}: lease", at_least=0, error=TransferError)
        if not isinstance(self.tokens, tuple) or not all(is_word(token) for token in self.tokens):
            raise TransferError(f"{self}: tokens must be a tuple of token ids; run the same version on both workers")
        if not isinstance(self.groups, Mapping):
            raise TransferError(f"{self}: groups must map signatures to what is offered, got {self.groups!r}")
        for signature, group in self.groups.items():
            self._check_group(signature, group)

    def __str__(self) -> str:
        return f"offer of {self.engine} for request {self.request!r}"

    def _check_group(self, signature: GroupSignature, group: OfferedGroup) -> None:
        if not isinstance(signature, GroupSignature) or not isinstance(group, OfferedGroup):
            raise TransferError(f"{self}: {signature!r} is no group of an offer; run the same version on both workers")
        what = f"{self}: group {signature.name}"
        interval, pages, size = group
        whole_number(size, f"{what}: page_tokens", at_least=1, error=TransferError)
        interval = checked_interval(interval, what, TransferError)
        if interval.end > len(self.tokens):
            raise TransferError(f"{what} covers {interval}, but only {len(self.tokens)} tokens are offered")
        if not isinstance(pages, tuple) or not all(is_word(page) for page in pages):
            raise TransferError(f"{what}: pages must be a tuple of page numbers, got {pages!r}")
        touched = pages_under(interval, size)
        if len(pages) < touched.stop:
            raise TransferError(
                f"{what} covers {interval} with pages of {size} tokens, which takes {touched.stop} page(s), but it "
                f"lists {len(pages)}; ask the peer for a new offer"
            )
        if any(pages[number] == NULL_PAGE for number in touched):
            raise TransferError(f"{what} covers {interval}, but lists a page there that it does not hold")


def shared_groups(local: KVLayout, identity: CacheIdentity, remote: Sequence[GroupSignature]) -> frozenset[int]:
    """Returns the local group numbers that the peer can send: the handshake.

    Target groups must all be there, from the same weights. Draft groups that the peer lacks are left out, and
    counted by the caller.
    """
    theirs = set(remote)
    own = signatures(local, identity)
    strangers = [signature.identity for signature in remote if signature.identity != identity.label]
    if strangers:
        raise TransferError(
            f"the peer's KV comes from another model: here {identity.label}; there {strangers[0]}; run the same "
            "weights, dtype and layout on both workers"
        )
    missing = [own[g].name for g in local.target_groups if own[g] not in theirs]
    if missing:
        raise TransferError(
            f"the peer's target layout differs in group(s) {', '.join(missing)}; run the same model, dtype and "
            "attention layout on both workers"
        )
    draft = [g for g in local.draft_groups if own[g] in theirs]
    complete = len(draft) == len(local.draft_groups)
    return frozenset([*local.target_groups, *(draft if complete else ())])


def offered_intervals(local: KVLayout, identity: CacheIdentity, offer: Offer) -> dict[int, Interval]:
    """Returns what a peer holds of a request, by local group number."""
    own = signatures(local, identity)
    groups = shared_groups(local, identity, tuple(offer.groups))
    return {g: offer.groups[own[g]].interval for g in sorted(groups)}


def plan_pull(
    layout: KVLayout, identity: CacheIdentity, load: Load, offer: Offer, table: Sequence[int]
) -> tuple[SlotRun, ...]:
    """Returns the slots to copy for one load. Raises TransferError if the peer does not hold all of it."""
    signature = signatures(layout, identity)[load.group]
    offered = offer.groups.get(signature)
    if offered is None or not offered.interval.covers(load.interval):
        have = "nothing" if offered is None else str(offered.interval)
        raise TransferError(f"group {signature.name}: wanted {load.interval}, the peer holds {have}")
    return tuple(
        pair(
            load.interval,
            source=offered.interval,
            source_pages=offered.pages,
            source_page_tokens=offered.page_tokens,
            destination_pages=table,
            destination_page_tokens=layout.groups[load.group].page_tokens,
        )
    )


@dataclass(slots=True)
class LeaseBook:
    """A prefill worker's promises to keep pages in place. Times are ticks of the worker's clock."""

    duration: int
    _ends: dict[int, int] = field(default_factory=dict)
    _owners: dict[int, str] = field(default_factory=dict)
    _next: int = 0

    def grant(self, request: str, now: int) -> int:
        lease = self._next
        self._next += 1
        self._ends[lease] = now + self.duration
        self._owners[lease] = request
        return lease

    def held(self, lease: int) -> bool:
        """Whether the pages were in place from the grant until now; D asks this after the last byte has arrived."""
        return lease in self._ends

    def release(self, lease: int) -> str | None:
        """End a lease. Returns the request whose pages may be released, or None if the lease had ended before."""
        self._ends.pop(lease, None)
        return self._owners.pop(lease, None)

    def expire(self, now: int) -> list[str]:
        """End every lease that has run out. Returns the requests whose pages may be released."""
        ended = [lease for lease, end in self._ends.items() if end <= now]
        return [request for lease in ended if (request := self.release(lease)) is not None]
