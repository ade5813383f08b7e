"""The index of one request's own text: where its last tokens occurred before."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from outrider.speculative.lookup.config import LookupConfig
from outrider.speculative.lookup.match import Match

CHECKED_TOKENS = 64
"""Number of tokens at the end of the known text that every call compares."""
FEWEST_BUCKETS = 256
FEW_RUNS = 6
"""Fewer runs than this are entered faster one by one."""


class Chains:
    """For each run of `length` tokens, the chain of its occurrences, latest first.

    An occurrence is named by the position after it, where its continuation starts. Runs whose hashes fall into one
    bucket have one chain, so what a chain yields must be compared with the text.
    """

    __slots__ = ("_heads", "_mask", "_previous", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self._previous = array("i", [-1]) * length
        """For each position, the one before it in its chain, or -1. The first `length` positions end no run."""
        self._heads = array("i")
        """For each bucket, the latest position in its chain, or -1."""
        self._mask = -1

    @property
    def memory_bytes(self) -> int:
        return self._previous.itemsize * (len(self._previous) + len(self._heads))

    def candidates(self, run: tuple[int, ...]) -> tuple[int, array[int]]:
        """Returns the latest position after such a run, or -1, and for each position the one before it."""
        return (self._heads[hash(run) & self._mask] if self._heads else -1), self._previous

    def extend(self, text: array[int], end: int) -> None:
        """Adds the runs that end before `end`, as far as they are not in the index."""
        if end > len(self._heads):
            self._grow(end)
        self._insert(text, len(self._previous), end)

    def cut(self, text: array[int], end: int) -> None:
        """Removes the runs that end at `end` or later; `text` still has their tokens."""
        length, previous, heads = self.length, self._previous, self._heads
        while len(previous) > max(end, length):
            position = len(previous) - 1
            heads[hash(tuple(text[position - length : position])) & self._mask] = previous.pop()

    def _insert(self, text: array[int], start: int, end: int) -> None:
        length, heads, mask = self.length, self._heads, self._mask
        append = self._previous.append
        if end - start < FEW_RUNS:
            for position in range(start, end):
                bucket = hash(tuple(text[position - length : position])) & mask
                append(heads[bucket])
                heads[bucket] = position
            return
        runs = zip(*[text[start - length + place : end - length + place] for place in range(length)], strict=True)
        for position, key in enumerate(map(hash, runs), start):
            bucket = key & mask
            append(heads[bucket])
            heads[bucket] = position

    def _grow(self, end: int) -> None:
        """Makes room for a text at least twice as long, so that a text that grows is indexed no more than twice on
        average."""
        buckets = max(FEWEST_BUCKETS, 1 << (2 * end - 1).bit_length())
        self._mask = buckets - 1
        self._heads = array("i", [-1]) * buckets
        del self._previous[self.length :]


class OwnText:
    """What one request has written and read so far.

    The index holds the runs of tokens that another token follows: those that end at the end of the text are what is
    looked up.
    """

    __slots__ = ("_chains", "_config", "_text")

    def __init__(self, config: LookupConfig) -> None:
        self._config = config
        self._chains = tuple(Chains(length) for length in config.own_keys)
        self._text = array("I")

    @property
    def memory_bytes(self) -> int:
        return self._text.itemsize * len(self._text) + sum(chains.memory_bytes for chains in self._chains)

    def follow(self, tokens: Sequence[int]) -> int:
        """Brings the index up to date with the text, and returns how many tokens are new.

        Between two calls a text grows, and may lose tokens at its end that were sampled and not committed. The last
        tokens of the known text are compared each time, and all of them if one differs.
        """
        text = self._text
        known, count = len(text), len(tokens)
        checked = max(0, known - CHECKED_TOKENS)
        end = tokens[checked:known]
        if not isinstance(end, array):
            end = array("I", end)
        if count < known or end != text[checked:]:
            self._cut(tokens)
            known = len(text)
        if count > known:
            new = tokens[known:]
            text.extend(new if isinstance(new, array) else array("I", new))
            for chains in self._chains:
                if count > chains.length:
                    chains.extend(text, count)
        return count - known

    def find(self, recent: Sequence[int], k: int) -> Match | None:
        """Returns the longest earlier occurrence of the end of the text; the latest of equals. `recent` has the last
        tokens, the last one first, as many as a match may have."""
        text, end = self._text, len(self._text)
        best, source = 0, -1
        longest = len(recent)
        for chains in self._chains:
            if chains.length > longest:
                continue
            best = chains.length - 1
            candidate, previous = chains.candidates(tuple(text[end - chains.length :]))
            for _ in range(self._config.most_candidates):
                if candidate < 0:
                    break
                # Only an occurrence that agrees in one more token than the best can be better.
                if text[candidate - 1 - best] == recent[best]:
                    length = self._agreeing(candidate, recent, longest)
                    if length > best:
                        best, source = length, candidate
                        if best == longest:
                            break
                candidate = previous[candidate]
            if source >= 0:
                return Match(self._copied(source, k), best, False)
            # A longer match would have been found with these keys.
            longest = chains.length - 1
        return None

    def _agreeing(self, candidate: int, recent: Sequence[int], longest: int) -> int:
        """Returns how many tokens before the candidate agree with the last ones."""
        text, length = self._text, 0
        limit = min(longest, candidate)
        while length < limit and text[candidate - 1 - length] == recent[length]:
            length += 1
        return length

    def _copied(self, source: int, k: int) -> list[int]:
        """Copies `k` tokens from `source`; past the end of the text the copy repeats what it has copied."""
        copied = self._text[source : source + k].tolist()
        period = len(self._text) - source
        for place in range(len(copied), k):
            copied.append(copied[place - period])
        return copied

    def _cut(self, tokens: Sequence[int]) -> None:
        """Cuts the index back to what the known text and `tokens` have in common at their beginning."""
        text = self._text
        most = min(len(text), len(tokens))
        given = array("I", tokens[:most])
        common = bisect_left(range(most), True, key=lambda place: text[: place + 1] != given[: place + 1])
        for chains in self._chains:
            chains.cut(text, common)
        del text[common:]
