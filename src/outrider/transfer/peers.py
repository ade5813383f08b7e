"""The prefill workers that a decode worker fetches from: the handshake with each, and what ends it.

approach ──Hello──▶ ... ──Welcome──▶ met ──cut_off──▶ fencing ──Quiet──▶ forgotten
                     └── no answer, refused ──▶ forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from outrider.errors import TransferError
from outrider.kv.layout import KVLayout
from outrider.kv.prefix import CacheIdentity
from outrider.transfer.link import Link
from outrider.transfer.messages import Hello, Welcome
from outrider.transfer.offers import GroupSignature, layout_digest, shared_groups
from outrider.transfer.records import RENEWALS_PER_LEASE, TransferCounters, TransferLimits

IDLE_PEER_S = 600.0
"""Time after its last hand-off in which a peer stays connected. Workers that were replaced are forgotten after it."""
RENEW_S_MIN = 0.02
"""The shortest time between two renewals, whatever a peer says of its leases."""


@dataclass(slots=True, eq=False)
class Peer:
    """A prefill worker that this worker fetches from."""

    endpoint: str
    deadline_s: float
    used_s: float
    """When a hand-off last asked it for KV."""
    asked_again: bool = False
    engine: str | None = None
    """None until the peer has said Welcome."""
    signatures: tuple[GroupSignature, ...] = ()
    renew_s: float = 0.0
    """How often its leases are to be prolonged."""
    lacks_groups: bool = False
    """Whether it has none of this worker's draft groups, or not all of them."""
    fencing: bool = False
    """Whether it was cut off, and is not quiet yet."""


class Peers:
    def __init__(
        self,
        link: Link,
        layout: KVLayout,
        identity: CacheIdentity,
        *,
        reader: str,
        limits: TransferLimits,
        counters: TransferCounters,
        clock: Callable[[], float],
    ) -> None:
        """`reader`: the engine id of this worker."""
        self._link = link
        self._layout = layout
        self._identity = identity
        self._reader = reader
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._peers: dict[str, Peer] = {}

    def get(self, endpoint: str) -> Peer | None:
        return self._peers.get(endpoint)

    def approach(self, endpoint: str) -> None:
        """Begin the handshake with a peer that is not known."""
        now_s = self._clock()
        self._peers[endpoint] = peer = Peer(endpoint, now_s + self._limits.answer_s, now_s)
        self.greet(peer)

    def greet(self, peer: Peer) -> None:
        self._link.send(peer.endpoint, Hello(digest=layout_digest(self._layout, self._identity), reader=self._reader))

    def welcome(self, endpoint: str, message: Welcome) -> Peer | None:
        """Take in the answer to a greeting. Returns the peer, from which KV can be fetched now; None if it is to be
        waited for. Raises TransferError, and forgets the peer, if none of its KV is of use here."""
        peer = self._peers.get(endpoint)
        if peer is None or peer.fencing:
            return None
        if peer.engine is None:
            try:
                peer.signatures = tuple(GroupSignature.of(signature) for signature in message.signatures)
                shared = shared_groups(self._layout, self._identity, peer.signatures)
                if not message.lease_s > 0.0:
                    raise TransferError(f"the prefill worker says that its leases last {message.lease_s} s")
                self._link.meet(endpoint, message.introduction)
            except TransferError:
                self.forget(peer)
                raise
            peer.renew_s = max(RENEW_S_MIN, min(self._limits.renew_s, message.lease_s / RENEWALS_PER_LEASE))
            peer.engine, peer.lacks_groups = message.engine, len(shared) < len(self._layout.groups)
        elif peer.engine != message.engine:
            # The peer was restarted: what is known of it belongs to the process that is gone.
            self.cut_off(peer)
            return None
        return peer

    def forget(self, peer: Peer) -> None:
        """Drop what is known of a peer; the next ticket that names it begins anew."""
        del self._peers[peer.endpoint]
        self._link.forget(peer.endpoint)

    def cut_off(self, peer: Peer) -> None:
        """End all reads from a peer. It is forgotten once it is quiet."""
        if not peer.fencing:
            peer.fencing = True
            self._counters.fences += 1
            self._link.fence(peer.endpoint)

    def quiet(self, endpoint: str) -> None:
        """Note that nothing of a peer that was cut off can land any more."""
        self._peers.pop(endpoint, None)

    def overdue(self, now_s: float) -> list[Peer]:
        """Greet peers again that have not answered in time. Returns those that have not answered again."""
        silent = []
        for peer in self._peers.values():
            if peer.engine is not None or peer.fencing or peer.deadline_s > now_s:
                continue
            if peer.asked_again:
                silent.append(peer)
            else:
                peer.asked_again, peer.deadline_s = True, now_s + self._limits.answer_s
                self.greet(peer)
        return silent

    def forget_idle(self, now_s: float, in_use: Callable[[], Collection[str]]) -> None:
        """Forget peers that no hand-off has used for long. `in_use` returns the endpoints that hand-offs refer to."""
        idle = [
            peer
            for peer in self._peers.values()
            if peer.engine is not None and not peer.fencing and now_s - peer.used_s >= IDLE_PEER_S
        ]
        used = in_use() if idle else ()
        for peer in idle:
            if peer.endpoint not in used:
                self.forget(peer)

    @property
    def deadlines_s(self) -> list[float]:
        return [peer.deadline_s for peer in self._peers.values() if peer.engine is None and not peer.fencing]
