"""Shadow memory: for every slot, what it holds, its state, and its last writer.

The identity of a slot is a hash of the namespace and of tokens[: p + 1 + reach], the tokens its bytes
depend on. It is computed here from the tokens, apart from the code that is being checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from outrider.kv.prefix import Media

EMPTY, SCRATCH, DURABLE = 0, 1, 2
_MASK = (1 << 64) - 1


def namespace_seed(*fields: str) -> int:
    return int.from_bytes(blake2b(repr(fields).encode(), digest_size=8).digest(), "little")


class TokenHashes:
    """Running hashes of one token sequence: `upto[i]` stands for the namespace and tokens[:i].

    At media positions the content stands beside the token id, which is only a placeholder there.
    """

    __slots__ = ("_contents", "_tokens", "upto")

    def __init__(self, seed: int, tokens: array[int], media: Sequence[Media] = ()) -> None:
        self._tokens = tokens
        self._contents = media_contents(media)
        self.upto = [seed]

    def extend(self) -> list[int]:
        """Returns the hashes for all tokens known now."""
        upto, tokens = self.upto, self._tokens
        del upto[len(tokens) + 1 :]
        value, contents = upto[-1], self._contents
        first = len(upto) - 1
        for position, token in enumerate(tokens[first:], start=first):
            value = step_hash(value, token)
            if contents and position in contents:
                value = step_hash(value, contents[position])
            upto.append(value)
        return upto

    def beyond(self, start: int, tokens: Sequence[int]) -> list[int]:
        """Returns the hashes of tokens[:start] followed by other tokens, one for each of them."""
        value = self.extend()[start]
        out = []
        for token in tokens:
            value = step_hash(value, token)
            out.append(value)
        return out


def media_contents(media: Sequence[Media]) -> dict[int, int]:
    """Returns a number for each media position that stands for what is shown there."""
    return {
        position: namespace_seed(item.digest.hex(), str(position - item.start))
        for item in media
        for position in range(item.start, item.end)
    }


def shows_media(media: Sequence[Media], start: int, end: int) -> bool:
    """Whether a position of [start, end) shows media."""
    return any(item.start < end and start < item.end for item in media)


def step_hash(value: int, token: int) -> int:
    value = (value * 6364136223846793005 + token + 1442695040888963407) & _MASK
    return value ^ (value >> 29)


class Writer(NamedTuple):
    request: str
    step: int
    what: str

    def __str__(self) -> str:
        return "none" if self.step < 0 else f"{self.what} of {self.request} at step {self.step}"


NO_WRITER = Writer("", -1, "")


class PageShadow:
    """The shadow of one physical page."""

    __slots__ = (
        "group",
        "ids",
        "pending",
        "published",
        "quarantined",
        "refs",
        "shows_media",
        "sources",
        "states",
        "writers",
    )

    def __init__(self, slots: int) -> None:
        self.refs = 0
        self.pending = 0
        self.sources = 0
        """Number of references that only wait to copy from the page."""
        self.quarantined = False
        self.published = False
        self.shows_media = False
        self.clear(slots)

    def clear(self, slots: int) -> None:
        self.group = -1
        self.ids = [0] * slots
        self.states = bytearray(slots)
        self.writers = [NO_WRITER] * slots
