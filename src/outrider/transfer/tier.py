"""What holds pages behind the device, as the driver sees it: the counterpart of a link.

    device ──put──▶ tier ──get──▶ device            look_up: which of these keys are there?

Every operation takes many pages, has a number that the driver gives it, and ends with one `Done`. No call blocks, and
no call raises because of the state of a tier: whatever goes wrong is an outcome of False, which is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TierPage(NamedTuple):
    """A page on the device, and its key in every tier."""

    key: bytes
    """The group's tag, which no other group of any engine has, and the page's key in the prefix index."""
    group: int
    page: int
    parent: bytes = b""
    """The base of the chain where the page starts; given to `put`."""


class Done(NamedTuple):
    """An operation has ended: nothing of it reads or writes a page any more."""

    number: int
    outcomes: tuple[bool, ...]
    """Whether each page was found, stored or loaded, in the order in which they were given."""
    refused: int = 0
    """Number of values that were there, but whose trailer was not right."""


class Tier(Protocol):
    @property
    def name(self) -> str:
        """What metrics call the tier."""

    @property
    def is_local(self) -> bool:
        """Whether `contains` is always up to date; if not, the tier has to be asked by `look_up`."""

    @property
    def batch_max(self) -> int:
        """Most pages of one operation."""

    @property
    def keys_max(self) -> int:
        """Most keys of one question."""

    def contains(self, key: bytes) -> bool:
        """Whether a local tier holds this page."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that these pages, if a local tier holds them, are of use: the first ones are given up first."""

    def look_up(self, number: int, keys: Sequence[bytes]) -> None:
        """Ask which of these pages a tier holds that is not local."""

    def put(self, number: int, pages: Sequence[TierPage]) -> None:
        """Copy pages from the device. They stay as they are until `Done` says that this has ended."""

    def get(self, number: int, pages: Sequence[TierPage]) -> None:
        """Copy pages to the device. After its `Done`, nothing is written to them."""

    def poll(self) -> list[Done]:
        """Returns the operations that have ended since the last call."""

    def clear(self) -> None:
        """Empty a local tier; what others share stays."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `poll` has something to return; -1 if nothing waits on it."""

    def close(self) -> None:
        """End the tier and its threads. Nothing is written to a page after this returns."""
