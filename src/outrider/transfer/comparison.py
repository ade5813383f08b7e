"""At sanitizer level `bytes`, a decode worker compares what arrived with what the prefill worker holds."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.transfer.hand_offs import HandOff
from outrider.transfer.records import TransferChecks


def take_back_what_differs(hand_off: HandOff, digests: Sequence[bytes], checks: TransferChecks) -> None:
    """Count loads whose bytes are not the sender's as failed. `digests`: the sender's, in the order of the loads."""
    assert hand_off.offer is not None
    if len(digests) != len(hand_off.landed):
        hand_off.reason = "the prefill worker sent no digests of what it holds"
        hand_off.failed, hand_off.landed = hand_off.failed + hand_off.landed, []
        return
    intact = []
    for load, digest in zip(hand_off.landed, digests, strict=True):
        if digest == checks.digest(hand_off.sequence, load):
            intact.append(load)
        else:
            hand_off.failed.append(load)
            hand_off.reason = "bytes that arrived are not those that the prefill worker holds"
            checks.differs(hand_off.sequence, load, hand_off.offer.engine)
    hand_off.landed = intact
