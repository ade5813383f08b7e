"""The link of a worker without peers: it has tiers behind its device, and nothing else moves KV."""

from __future__ import annotations

from outrider.errors import TransferError
from outrider.transfer.link import Event, GroupRead
from outrider.transfer.messages import Message


class NoLink:
    endpoint = ""
    transport = ""

    def introduction(self) -> bytes:
        return b""

    def meet(self, peer: str, introduction: bytes) -> None:
        raise TransferError("this worker has no peers")

    def send(self, peer: str, message: Message) -> None:
        """There is no worker to send it to."""

    def read(self, peer: str, read: GroupRead) -> int:
        raise TransferError("this worker has no peers")

    def poll(self) -> list[Event]:
        return []

    def fence(self, peer: str) -> None:
        """Nothing is on its way."""

    def forget(self, peer: str) -> None:
        """Nothing is kept."""

    def fileno(self) -> int:
        return -1

    def wait(self, limit_s: float) -> None:
        """Nothing can happen."""

    def close(self) -> None:
        """Nothing is open."""
