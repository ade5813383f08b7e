"""Answers what decode workers ask of a prefill worker. Called on the link's thread, while the engine runs steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.kv.intervals import Interval
from outrider.transfer.leases import LeaseBook
from outrider.transfer.messages import (
    Confirm,
    Confirmed,
    Fetch,
    Hello,
    Message,
    Refused,
    Release,
    Renew,
    Welcome,
)
from outrider.transfer.offers import GroupSignature, OfferedGroup, to_wire

Digest = Callable[[int, OfferedGroup, Interval], bytes]
"""Digest of slots of a group, in the order of their positions and independent of page sizes."""


class Desk:
    def __init__(
        self,
        *,
        engine: str,
        digest: bytes,
        signatures: Sequence[GroupSignature],
        leases: LeaseBook,
        clock: Callable[[], float],
        digest_slots: Digest | None = None,
        hands_over: bool = True,
    ) -> None:
        """`digest`: what a peer's `Hello` must carry (`offers.layout_digest`). `hands_over`: whether this worker
        computes prompts for others; without that it refuses every greeting."""
        self._engine = engine
        self._digest = digest
        self._signatures = tuple(signatures)
        self.leases = leases
        self._clock = clock
        self._digest_slots = digest_slots
        self._hands_over = hands_over

    def answer(self, message: Message, introduction: Callable[[], bytes]) -> Message | None:
        """Returns the answer to a peer's message; None if it needs none or is no question."""
        match message:
            case Hello():
                return self._welcome(message, introduction)
            case Fetch(lease=lease, reader=reader):
                offer = self.leases.claim(lease, reader, self._clock())
                if isinstance(offer, str):
                    return Refused(lease=lease, reason=offer)
                return to_wire(offer, lease, self._signatures)
            case Renew(leases=leases, reader=reader):
                for lease in leases:
                    self.leases.renew(lease, reader, self._clock())
            case Confirm():
                return self._confirm(message)
            case Release(lease=lease, reader=reader):
                self.leases.release(lease, reader)
        return None

    def _welcome(self, hello: Hello, introduction: Callable[[], bytes]) -> Message:
        wire = [signature.wire for signature in self._signatures]
        if not self._hands_over:
            return Refused(
                reason="the worker hands no KV over (kv_role kv_consumer); start it as kv_producer or kv_both, or name "
                "another prefill worker"
            )
        if hello.digest != self._digest:
            here = self._signatures[0].identity
            return Refused(
                reason=f"the target's KV or the protocol differs; the prefill worker has {here}; run the same version, "
                "weights, dtype and attention layout on both workers",
                signatures=wire,
            )
        return Welcome(
            engine=self._engine,
            signatures=wire,
            lease_s=self.leases.duration_s,
            introduction=introduction(),
        )

    def _confirm(self, message: Confirm) -> Confirmed:
        lease, reader, question = message.lease, message.reader, message.question
        offer = self.leases.held(lease, reader)
        digests: list[bytes] = []
        if offer is not None and message.digests_of and self._digest_slots is not None:
            # Each slot once: a question that repeats slots without end would keep this thread from all other peers.
            slots_left = sum(held.interval.size for held in offer.groups.values())
            for group, start, end in message.digests_of:
                held = offer.groups.get(self._signatures[group]) if 0 <= group < len(self._signatures) else None
                interval = Interval(start, end)
                slots_left -= interval.size
                if held is None or not 0 <= start < end or not held.interval.covers(interval) or slots_left < 0:
                    return Confirmed(lease=lease, question=question, held=False)
                digests.append(self._digest_slots(group, held, interval))
            # The pages may have been given back while they were read.
            offer = self.leases.held(lease, reader)
        held_on = offer is not None
        return Confirmed(lease=lease, question=question, held=held_on, digests=digests if held_on else [])
