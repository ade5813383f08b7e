"""Shadow memory: for every slot, what it holds, in which state, and who wrote it.

The identity of a slot is a hash of the namespace and of tokens[: p + 1 + reach], the tokens its bytes
depend on. It is computed here from the tokens, apart from the code that is being checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

EMPTY, SCRATCH, DURABLE = 0, 1, 2
_MASK = (1 << 64) - 1


def namespace_seed(*fields: str) -> int:
    return int.from_bytes(blake2b(repr(fields).encode(), digest_size=8).digest(), "little")


class TokenHashes:
    """Running hashes of one token sequence: `upto[i]` stands for the namespace and tokens[:i]."""

    __slots__ = ("_tokens", "upto")

    def __init__(self, seed: int, tokens: array[int]) -> None:
        self._tokens = tokens
        self.upto = [seed]

    def extend(self) -> list[int]:
        """Hashes for all tokens known now."""
        upto, tokens = self.upto, self._tokens
        del upto[len(tokens) + 1 :]
        value = upto[-1]
        for token in tokens[len(upto) - 1 :]:
            value = step_hash(value, token)
            upto.append(value)
        return upto

    def beyond(self, start: int, tokens: Sequence[int]) -> list[int]:
        """Hashes of tokens[:start] followed by other tokens, one for each of them."""
        value = self.extend()[start]
        out = []
        for token in tokens:
            value = step_hash(value, token)
            out.append(value)
        return out


def step_hash(value: int, token: int) -> int:
    value = (value * 6364136223846793005 + token + 1442695040888963407) & _MASK
    return value ^ (value >> 29)


class Writer(NamedTuple):
    request: str
    step: int
    what: str

    def __str__(self) -> str:
        return "nobody" if self.step < 0 else f"{self.what} of {self.request} at step {self.step}"


NOBODY = Writer("", -1, "")


class PageShadow:
    """One physical page."""

    __slots__ = (
        "group",
        "ids",
        "pending",
        "published",
        "quarantined",
        "refs",
        "sources",
        "states",
        "writers",
    )

    def __init__(self, slots: int) -> None:
        self.refs = 0
        self.pending = 0
        self.sources = 0
        """Holds that only wait to copy from it."""
        self.quarantined = False
        self.published = False
        self.clear(slots)

    def clear(self, slots: int) -> None:
        self.group = -1
        self.ids = [0] * slots
        self.states = bytearray(slots)
        self.writers = [NOBODY] * slots
