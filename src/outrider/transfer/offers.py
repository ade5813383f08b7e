"""What a prefill worker (P) offers a decode worker (D), and how the two find each other's slots.

    P: prefill ─▶ Lease + Offer ─────────────────────────────┐          (pages held while the lease runs)
    D: admit ─▶ loads ─▶ plan_pull(load, offer) ─▶ copy slots ─▶ ask P: did the lease hold? ─▶ import

Both sides speak in token intervals per group. A group is recognised by its signature, which leaves the
page size out: page sizes may differ, weights and layouts may not.

An offer comes from another machine: everything in it is checked when it is made, and TransferError says what
is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isnan
from typing import NamedTuple

from outrider.errors import TransferError
from outrider.kv.checked import checked_interval, is_word, whole_number
from outrider.kv.intervals import Interval, SlotRun, pages_under, pair
from outrider.kv.layout import KVLayout
from outrider.kv.ledger import Load
from outrider.kv.pages import NULL_PAGE
from outrider.kv.prefix import CacheIdentity, Media
from outrider.transfer.messages import PROTOCOL, Offered, OfferedPages, ScoredToken, Signature

BINDING_BYTES = 16
ADVICE = "run the same version on both workers"


class GroupSignature(NamedTuple):
    """The properties that must be equal for slots of two groups to be interchangeable."""

    name: str
    kind: str
    slot_bytes: int
    reach: int
    owner: str
    identity: str
    """The weights, dtype and layout that the bytes come from, and the part of them that this rank holds."""

    @classmethod
    def of(cls, signature: Signature) -> GroupSignature:
        return cls(*(getattr(signature, name) for name in cls._fields))

    @property
    def wire(self) -> Signature:
        return Signature(**self._asdict())


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


def layout_digest(layout: KVLayout, identity: CacheIdentity) -> bytes:
    """Returns a digest of the protocol and of the target's KV, which both workers of a hand-off must share."""
    target = [tuple(signature) for signature in signatures(layout, identity)[: layout.num_target]]
    return blake2b(repr((PROTOCOL, target)).encode(), digest_size=BINDING_BYTES).digest()


def prompt_binding(tokens: Sequence[int], *, adapter: str = "", salt: str = "", media: Iterable[Media] = ()) -> bytes:
    """Returns a digest of everything that a client's prompt is made of: an offer is for this prompt and no other."""
    hasher = blake2b(digest_size=BINDING_BYTES)
    fields = [adapter.encode(), salt.encode()]
    fields += [f"{item.start} {item.end} ".encode() + item.digest for item in media]
    for field in (*fields, b"".join(token.to_bytes(4, "little") for token in tokens)):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


class OfferedGroup(NamedTuple):
    """Durable slots that a prefill worker offers of one group. `pages` is indexed by page number."""

    interval: Interval
    pages: tuple[int, ...]
    page_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a prefill worker holds for a prompt: slots per group, and the token that it sampled after the prompt."""

    engine: str
    """An id that is new at each start of the worker, so that a restarted peer is never mistaken for the old one."""
    binding: bytes
    """Which prompt it is: `prompt_binding`."""
    num_tokens: int
    """Length of the prompt."""
    first_token: int
    seed: int = 0
    """The seed that the first token was drawn with, for requests that name none."""
    logprobs: ScoredToken | None = None
    """Log-probabilities of the first token, if the request asked for them."""
    drafts: tuple[int, ...] = ()
    """Drafts of the tokens after the first one. Without them the decode worker's first step would verify nothing, and
    its later steps would begin elsewhere than a single worker's."""
    drafts_worth_asking: int | None = None
    """How many drafts the prefill worker would ask its drafter for next; None for as many as may be."""
    groups: Mapping[GroupSignature, OfferedGroup]

    def __post_init__(self) -> None:
        if not isinstance(self.engine, str) or not self.engine:
            raise TransferError(f"an offer names its engine, got {self.engine!r}; {ADVICE}")
        if not isinstance(self.binding, bytes) or len(self.binding) != BINDING_BYTES:
            raise TransferError(f"{self}: the binding must be {BINDING_BYTES} bytes; {ADVICE}")
        whole_number(self.num_tokens, f"{self}: num_tokens", at_least=1, error=TransferError)
        if not is_word(self.first_token):
            raise TransferError(f"{self}: the first token must be a token id, got {self.first_token!r}; {ADVICE}")
        if not isinstance(self.drafts, tuple) or not all(is_word(draft) for draft in self.drafts):
            raise TransferError(f"{self}: drafts must be a tuple of token ids, got {self.drafts!r}; {ADVICE}")
        worth = self.drafts_worth_asking
        if worth is not None and not is_word(worth):
            raise TransferError(f"{self}: drafts_worth_asking must be a whole number of at least 0, got {worth!r}")
        if not isinstance(self.groups, Mapping):
            raise TransferError(f"{self}: groups must map signatures to what is offered, got {self.groups!r}")
        for signature, group in self.groups.items():
            self._check_group(signature, group)

    def __str__(self) -> str:
        return f"offer of {self.engine}"

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse tokens that the model does not have: an index outside the vocabulary would end a whole step."""
        tokens = [self.first_token, *self.drafts]
        if self.logprobs is not None:
            tokens += [self.logprobs.token, *(token for token, _logprob in self.logprobs.top)]
            if any(isnan(value) for value in (self.logprobs.logprob, *(value for _, value in self.logprobs.top))):
                raise TransferError(f"{self} has a log-probability that is no number; {ADVICE}")
        outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise TransferError(f"{self} names token {outside}, but the vocabulary has {vocab_size} tokens; {ADVICE}")

    def _check_group(self, signature: GroupSignature, group: OfferedGroup) -> None:
        if not isinstance(signature, GroupSignature) or not isinstance(group, OfferedGroup):
            raise TransferError(f"{self}: {signature!r} is no group of an offer; {ADVICE}")
        what = f"{self}: group {signature.name}"
        interval, pages, size = group
        whole_number(size, f"{what}: page_tokens", at_least=1, error=TransferError)
        interval = checked_interval(interval, what, TransferError)
        if interval.end > self.num_tokens:
            raise TransferError(f"{what} covers {interval}, but only {self.num_tokens} tokens are offered")
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


def to_wire(offer: Offer, lease: bytes, own: Sequence[GroupSignature]) -> Offered:
    """Returns the message that carries an offer. `own`: the offering worker's groups, in order."""
    groups = []
    for signature, (interval, pages, size) in offer.groups.items():
        under = pages_under(interval, size)
        groups.append(
            OfferedPages(
                group=own.index(signature),
                start=interval.start,
                end=interval.end,
                page_tokens=size,
                pages=list(pages[under.start : under.stop]),
            )
        )
    return Offered(
        lease=lease,
        engine=offer.engine,
        binding=offer.binding,
        num_tokens=offer.num_tokens,
        first_token=offer.first_token,
        seed=offer.seed,
        logprobs=offer.logprobs,
        drafts=list(offer.drafts),
        drafts_worth_asking=offer.drafts_worth_asking,
        groups=groups,
    )


def from_wire(message: Offered, theirs: Sequence[GroupSignature]) -> Offer:
    """Returns the offer in a message, checked. `theirs`: the offering worker's groups, in order."""
    groups = {}
    for item in message.groups:
        if not 0 <= item.group < len(theirs):
            raise TransferError(f"an offer of {message.engine} names group {item.group}, which it does not have")
        interval = checked_interval(Interval(item.start, item.end), f"offer of {message.engine}", TransferError)
        whole_number(item.page_tokens, f"offer of {message.engine}: page_tokens", at_least=1, error=TransferError)
        if interval.end > message.num_tokens:
            raise TransferError(f"an offer of {message.engine} covers {interval} of {message.num_tokens} tokens")
        before = (NULL_PAGE,) * pages_under(interval, item.page_tokens).start
        groups[theirs[item.group]] = OfferedGroup(interval, before + tuple(item.pages), item.page_tokens)
    return Offer(
        engine=message.engine,
        binding=message.binding,
        num_tokens=message.num_tokens,
        first_token=message.first_token,
        seed=message.seed,
        logprobs=message.logprobs,
        drafts=tuple(message.drafts),
        drafts_worth_asking=message.drafts_worth_asking,
        groups=groups,
    )


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
