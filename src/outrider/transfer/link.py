"""What carries messages and KV between two workers, as the driver sees it.

    driver of D ──send(Fetch)──▶ link ══▶ link ──▶ desk of P ──▶ link ══▶ link ──Received(Offered)──▶ driver of D
                ──read(runs)───▶ link ◀══ memory of P              ... ──Landed(transfer)──▶

No call blocks. The decode worker's driver asks, and the prefill worker's `Desk` answers, on whatever thread its link
receives messages: a step may take seconds, and a lease must not run out meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from outrider.kv.intervals import SlotRun
from outrider.transfer.messages import Message


class GroupRead(NamedTuple):
    """Slots of one KV group to copy from a peer's pages into local ones."""

    group: int
    """Number of the group in the local layout."""
    remote_group: int
    """Number of the same group in the peer's layout."""
    runs: tuple[SlotRun, ...]


class Received(NamedTuple):
    """A message of a peer, in answer to one that was sent to it."""

    peer: str
    message: Message


class Landed(NamedTuple):
    """All bytes of a transfer are in place."""

    transfer: int


class Failed(NamedTuple):
    """A transfer has ended without all of its bytes, and writes nothing any more."""

    transfer: int
    reason: str


class Quiet(NamedTuple):
    """The answer to `fence`: nothing of this peer's transfers before it can land any more."""

    peer: str


Event = Received | Landed | Failed | Quiet


class Link(Protocol):
    """One worker's end. Peers are named by the endpoint at which their link receives messages."""

    @property
    def endpoint(self) -> str:
        """Where peers reach this worker."""

    @property
    def transport(self) -> str:
        """How bytes travel, for people: the name of the link, and what it has chosen for each peer."""

    def introduction(self) -> bytes:
        """Returns what a peer's link must know about this one before it can read; opaque to everything else."""

    def meet(self, peer: str, introduction: bytes) -> None:
        """Take in the introduction of a peer that is about to be read from. Raises TransferError if it is unusable."""

    def send(self, peer: str, message: Message) -> None:
        """Send a message, which may be lost."""

    def read(self, peer: str, read: GroupRead) -> int:
        """Start to copy slots of a peer that was met; returns the number of the transfer, which is never used again.

        `Landed` or `Failed` follows, unless the peer stops answering; then only `fence` ends the transfer.
        """

    def poll(self) -> list[Event]:
        """Returns what has happened since the last call."""

    def fence(self, peer: str) -> None:
        """End all transfers of this peer, with `Failed` for each that has not ended; `Quiet` follows. The peer must be
        met again before it is read from."""

    def forget(self, peer: str) -> None:
        """Drop what is kept of a peer without open transfers."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `poll` has something to return."""

    def wait(self, limit_s: float) -> None:
        """Sleep until `poll` has something to return, at most this long."""

    def close(self) -> None:
        """End the link and its threads. Nothing lands after this returns."""
