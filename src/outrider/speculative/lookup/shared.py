"""Finished texts of all tenants in one bounded ring, and an index of them that keeps the tenants apart."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import repeat
from mmap import mmap
from typing import Literal, NamedTuple

from outrider.speculative.lookup.config import LookupConfig
from outrider.speculative.lookup.match import Match

BLOCK_TOKENS = 64
"""Texts that begin alike are stored once, up to the last whole block that they have in common."""


class Tenant:
    """The requests of one salt, as long as the ring has texts of theirs."""

    __slots__ = ("number", "salt", "texts")

    def __init__(self, salt: str, number: int) -> None:
        self.salt = salt
        self.number = number
        """What tells the tenant's runs from others with the same tokens in the index. It is never used again."""
        self.texts = 0


class FinishedText(NamedTuple):
    """A text in the ring, or the part of it that no text before it begins with."""

    start: int
    end: int
    tenant: Tenant
    blocks: tuple[int, ...]
    """Keys of the blocks at its beginning that it was the first to have."""


def zeros(code: Literal["I", "q"], count: int) -> memoryview[int]:
    """Returns zeros in memory that takes no room, and no time, until it is written to."""
    return memoryview(mmap(-1, count * array(code).itemsize)).cast(code)


class RingChains:
    """For each run of `length` tokens of a tenant, the chain of its occurrences, latest first.

    An occurrence is named by the position after it. Positions only grow; position p lies in slot p % size of the ring,
    and what is older than the oldest text in the ring has been overwritten, or may be at any time.
    """

    __slots__ = ("_heads", "_mask", "length", "previous")

    def __init__(self, length: int, size: int) -> None:
        buckets = 1 << (size - 1).bit_length()
        self.length = length
        self.previous = zeros("q", size)
        """For each slot of the ring, the position before it in its chain, or 0."""
        self._heads = zeros("q", buckets)
        self._mask = buckets - 1

    @property
    def memory_bytes(self) -> int:
        return self.previous.itemsize * (len(self.previous) + len(self._heads))

    def latest(self, tenant: int, run: tuple[int, ...]) -> int:
        return self._heads[hash((tenant, *run)) & self._mask]

    def extend(self, tenant: int, text: array[int], first: int, position: int) -> None:
        """Adds the runs of `text` that end at `first` or later, and before its end. Its first token is at
        `position`."""
        length, heads, mask, previous = self.length, self._heads, self._mask, self.previous
        size = len(previous)
        first = max(first, length)
        runs = zip(
            repeat(tenant),
            *[text[first - length + place : max(0, len(text) - length + place)] for place in range(length)],
            strict=False,
        )
        for place, key in enumerate(map(hash, runs), position + first):
            bucket = key & mask
            previous[place % size] = heads[bucket]
            heads[bucket] = place


class SharedTexts:
    """The texts that finished last, as many as fit; the oldest ones go first, whichever tenant has them.

    ring     … [ oldest text )[ … )[ latest text )
               floor                             end
    """

    def __init__(self, config: LookupConfig) -> None:
        self._config = config
        self._size = size = config.most_shared_tokens
        self._ring = zeros("I", size)
        self._chains = tuple(RingChains(length, size) for length in config.shared_keys)
        self._texts: list[FinishedText] = []
        self._starts: list[int] = []
        # No occurrence has position 0, which ends a chain.
        self._end = 1
        self._blocks: set[int] = set()
        """Keys of the blocks with which texts in the ring begin. A key depends on the tenant and all tokens before."""
        self._tenants: dict[str, Tenant] = {}
        self._next_tenant = 0
        self.indexed_tokens = 0
        self.evicted_texts = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of the texts in the ring."""
        return self._end - self._floor

    @property
    def memory_bytes(self) -> int:
        return self._ring.itemsize * self._size + sum(chains.memory_bytes for chains in self._chains)

    @property
    def _floor(self) -> int:
        return self._starts[0] if self._starts else self._end

    # ---- entering texts ------------------------------------------------------------------------------

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Keeps a finished text, or as much of its end as fits."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            tenant = Tenant(salt, self._next_tenant)
            self._next_tenant += 1
        blocks, known = self._unknown_blocks(tenant.number, tokens)
        # The last known block enters the index again: a text may have ended there, and its copies with it. The tokens
        # before are only stored, so that matches may reach back into them.
        known = max(0, known - BLOCK_TOKENS)
        begin = max(0, known - self._config.longest_match)
        if len(tokens) - begin > self._size:
            # Blocks that are not in the ring must not keep a later text from entering it.
            begin, blocks = len(tokens) - self._size, []
        text = array("I", tokens[begin:])
        first = max(1, known - begin)
        if len(text) <= max(first, self._config.shortest_shared_match):
            return
        self._make_room(len(text))
        start, self._end = self._end, self._end + len(text)
        self._write(start, text)
        for chains in self._chains:
            chains.extend(tenant.number, text, first, start)
        tenant.texts += 1
        self._tenants[salt] = tenant
        self._blocks.update(blocks)
        self._texts.append(FinishedText(start, self._end, tenant, tuple(blocks)))
        self._starts.append(start)
        self.indexed_tokens += len(text) - first

    def _unknown_blocks(self, tenant: int, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Returns the keys of the blocks with which no text of the tenant begins, and the position where they start."""
        new: list[int] = []
        known = 0
        for end, key in self._block_keys(tenant, tokens):
            if not new and key in self._blocks:
                known = end
            else:
                new.append(key)
        return new, known

    @staticmethod
    def _block_keys(tenant: int, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        key = tenant
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            key = hash((key, *tokens[end - BLOCK_TOKENS : end]))
            yield end, key

    def _make_room(self, count: int) -> None:
        """Drops the oldest texts until `count` tokens fit."""
        dropped = 0
        for text in self._texts:
            if self._end + count - text.start <= self._size:
                break
            dropped += 1
            for key in text.blocks:
                self._blocks.discard(key)
            text.tenant.texts -= 1
            if not text.tenant.texts:
                del self._tenants[text.tenant.salt]
        self.evicted_texts += dropped
        del self._texts[:dropped], self._starts[:dropped]

    def _write(self, start: int, text: array[int]) -> None:
        slot = start % self._size
        fits = min(len(text), self._size - slot)
        self._ring[slot : slot + fits] = text[:fits]
        self._ring[: len(text) - fits] = text[fits:]

    # ---- finding -------------------------------------------------------------------------------------

    def find(self, salt: str, recent: Sequence[int], shortest: int, k: int) -> Match | None:
        """Returns the longest occurrence of the end of a text in the tenant's texts, the latest of equals, if it is at
        least `shortest` tokens long. `recent` has the last tokens, the last one first."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            return None
        ring, size, floor = self._ring, self._size, self._floor
        longest, found = len(recent), None
        for chains in self._chains:
            best = max(chains.length, shortest) - 1
            if best >= longest:
                continue
            candidate, previous = chains.latest(tenant.number, tuple(recent[chains.length - 1 :: -1])), chains.previous
            for _ in range(self._config.most_candidates):
                if candidate < floor:
                    break
                # Only an occurrence that agrees in one more token than the best can be better.
                if ring[(candidate - 1 - best) % size] == recent[best]:
                    text = self._texts[bisect_right(self._starts, candidate) - 1]
                    # Runs of different tenants may have one chain.
                    if text.tenant is tenant:
                        length = self._agreeing(candidate, text.start, recent, longest)
                        if length > best:
                            best, found = length, (candidate, text.end)
                            if best == longest:
                                break
                candidate = previous[candidate % size]
            if found is not None:
                source, end = found
                drafts = [ring[place % size] for place in range(source, min(source + k, end))]
                return Match(drafts, best, True)
            longest = chains.length - 1
        return None

    def _agreeing(self, candidate: int, start: int, recent: Sequence[int], longest: int) -> int:
        """Returns how many tokens before the candidate agree with the last ones, as far as its text goes back."""
        ring, size, length = self._ring, self._size, 0
        limit = min(longest, candidate - start)
        while length < limit and ring[(candidate - 1 - length) % size] == recent[length]:
            length += 1
        return length
