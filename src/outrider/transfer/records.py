"""What the driver is given and what it reports: limits, counters, checks, and what prefill workers answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.kv.intervals import SlotRun
from outrider.kv.ledger import Load
from outrider.transfer.messages import ScoredToken
from outrider.transfer.offers import Offer

RENEWALS_PER_LEASE = 6
"""How often a lease is prolonged before it would run out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferLimits:
    """Times of one worker, in seconds of its clock."""

    lease_s: float = 30.0
    renew_s: float = 5.0
    """How often D asks P to prolong its leases; more often if P's leases are short."""
    answer_s: float = 5.0
    """How long D waits for an answer, before it asks once more, and then gives up."""
    read_s: float = 20.0
    """How long all reads of one request may take."""
    held_share: float = 0.25
    """The largest share of each arena that P holds for peers."""
    look_up_s: float = 0.02
    """How long a request waits to hear what tiers hold; after that, what they did not say is a miss."""
    tier_s: float = 2.0
    """How long all loads of one request from tiers may take."""
    pinned_share: float = 0.25
    """The largest share of each arena that is pinned at once while tiers copy it."""


@dataclass(slots=True)
class TransferCounters:
    """Totals since the worker started."""

    handed_over: int = 0
    hand_overs_refused: int = 0
    """Prompts that were handed over without KV, because too much was held already."""
    leases_expired: int = 0
    fetches: int = 0
    fetch_failures: int = 0
    """Requests whose KV did not come from their prefill worker, or not all of it."""
    draft_groups_missing: int = 0
    """Hand-offs without the drafter's KV, because the prefill worker runs another drafter or none."""
    queried_tokens: int = 0
    """Prompt tokens of requests with a ticket that the local cache did not hold."""
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    fences: int = 0
    """Peers that were cut off because a read did not end."""


class TransferChecks(Protocol):
    """What a checker is told about slots that arrive."""

    @property
    def compares_bytes(self) -> bool:
        """Whether the bytes of both workers are to be compared before they are used."""

    def digest(self, sequence: str, load: Load) -> bytes:
        """Returns the digest of the slots that a load has brought."""

    def arrived(self, sequence: str, load: Load, runs: Sequence[SlotRun], sender: str) -> None:
        """Note that slots are in place, and that their sender has confirmed them."""

    def differs(self, sequence: str, load: Load, sender: str) -> None:
        """Report that the bytes that arrived are not the sender's."""


class FirstToken(NamedTuple):
    """What a prefill worker sampled after the prompt, and what a decode worker needs to go on as it would have."""

    token: int
    seed: int
    logprobs: ScoredToken | None = None
    drafts: tuple[int, ...] = ()
    drafts_worth_asking: int | None = None
    settings: bytes = b""
    """Digest of the sampling settings that the token was drawn with."""


class Fetched(NamedTuple):
    """What came of asking a prefill worker for a request's KV."""

    sequence: str
    offer: Offer | None
    """None if there is none: the request is computed here, or fails, as the scheduler is configured."""
    reason: str = ""
    peer: str = ""
    """Endpoint of the prefill worker, for logs: clients must not learn it."""
