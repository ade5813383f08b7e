"""A prefill worker's promises to keep pages in place until a decode worker has read them.

    grant ─▶ unclaimed ──claim──▶ claimed by one reader ──release──▶ ended ─▶ the engine gives the pages back
                  └───────────────── expire ◀── renew ◀┘

The desk answers peers on the link's thread while the engine runs a step, so a lock guards the book. A lease leaves the
book before its pages are given back: as long as `held` says yes, the pages are intact.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from outrider.transfer.messages import LEASE_BYTES
from outrider.transfer.offers import Offer


class EndedLease(NamedTuple):
    """A lease whose pages may be given back."""

    sequence: str
    expired: bool
    """Whether it ran out; otherwise its reader released it."""


@dataclass(slots=True)
class _Lease:
    sequence: str
    offer: Offer
    end_s: float
    reader: str | None = None


class LeaseBook:
    def __init__(self, duration_s: float, *, on_ended: Callable[[], None] | None = None) -> None:
        """Times are those of the worker's own clock. `on_ended` is called, on the link's thread, when a reader has
        released a lease, so that its pages can be given back at once."""
        self.duration_s = duration_s
        self._on_ended = on_ended
        self._lock = Lock()
        self._leases: dict[bytes, _Lease] = {}
        self._ended: list[EndedLease] = []

    def grant(self, sequence: str, offer: Offer, now_s: float) -> bytes:
        """Promise to hold what is offered; returns the lease's id, which cannot be guessed."""
        lease = self._new_id()
        with self._lock:
            self._leases[lease] = _Lease(sequence, offer, now_s + self.duration_s)
        return lease

    def _new_id(self) -> bytes:
        return secrets.token_bytes(LEASE_BYTES)

    def claim(self, lease: bytes, reader: str, now_s: float) -> Offer | str:
        """Give a lease to its first reader. Returns what is offered, or why this reader cannot have it."""
        with self._lock:
            found = self._leases.get(lease)
            if found is None:
                return "there is no such lease: it has ended, or the worker was restarted since"
            if found.reader not in (None, reader):
                return "another worker has claimed this lease"
            found.reader, found.end_s = reader, now_s + self.duration_s
            return found.offer

    def renew(self, lease: bytes, reader: str, now_s: float) -> None:
        """Extend a lease that this reader has claimed."""
        with self._lock:
            found = self._leases.get(lease)
            if found is not None and found.reader == reader:
                found.end_s = now_s + self.duration_s

    def held(self, lease: bytes, reader: str) -> Offer | None:
        """Returns the offer if its pages were in place from the claim until now; D asks after the last byte."""
        with self._lock:
            found = self._leases.get(lease)
            return found.offer if found is not None and found.reader == reader else None

    def release(self, lease: bytes, reader: str) -> None:
        """End a lease that this reader has claimed, or that is unclaimed."""
        with self._lock:
            found = self._leases.get(lease)
            ends = found is not None and found.reader in (None, reader)
            if ends:
                self._end(lease, expired=False)
        if ends and self._on_ended is not None:
            self._on_ended()

    def expire(self, now_s: float) -> None:
        """End every lease that has run out."""
        with self._lock:
            for lease in [lease for lease, found in self._leases.items() if found.end_s <= now_s]:
                self._end(lease, expired=True)

    def _end(self, lease: bytes, *, expired: bool) -> None:
        self._ended.append(EndedLease(self._leases.pop(lease).sequence, expired))

    def withdraw(self, sequence: str) -> None:
        """End the leases of a sequence whose pages are gone, without reporting them."""
        with self._lock:
            for lease in [lease for lease, found in self._leases.items() if found.sequence == sequence]:
                del self._leases[lease]

    def take_ended(self) -> list[EndedLease]:
        """Returns the leases that have ended since the last call; their pages may be given back."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    @property
    def next_end_s(self) -> float | None:
        """When the next lease runs out, if it is not renewed."""
        with self._lock:
            return min((lease.end_s for lease in self._leases.values()), default=None)

    @property
    def num_claimed(self) -> int:
        """Number of leases that a peer may be reading under."""
        with self._lock:
            return sum(lease.reader is not None for lease in self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)
