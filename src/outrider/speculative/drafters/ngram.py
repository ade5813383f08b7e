"""Prompt look-up: what followed the last few tokens when they occurred before, will follow again.

Each request has an index from n-grams to the place after their latest occurrence, extended as tokens are
committed, so that a step costs the same however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.errors import ConfigError
from outrider.kv.checked import whole_number
from outrider.speculative.drafter import Drafter, ProposeRow
from outrider.speculative.footprints import DrafterShape, footprint_for


class NgramIndex:
    """Latest occurrences of the n-grams of one text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        """n-gram -> the position after its latest occurrence that is followed by something."""
        self._indexed = 0
        """n-grams that end before this position are in the index."""

    def follow(self, tokens: array[int], count: int) -> list[int]:
        """The next tokens, if the longest n-gram at the end of the text occurred before."""
        self._extend(tokens)
        end = len(tokens)
        for size in self._sizes:
            if size >= end:
                continue
            source = self._after.get(tuple(tokens[end - size : end]))
            if source is not None:
                return self._continuation(tokens, source, count)
        return []

    def _extend(self, tokens: array[int]) -> None:
        """Index everything but the n-grams at the very end, which nothing follows yet."""
        last = len(tokens) - 1
        for end in range(self._indexed + 1, last + 1):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, last)

    @staticmethod
    def _continuation(tokens: array[int], source: int, count: int) -> list[int]:
        """Copy from `source`. Past the end of the text the copy goes on reading itself: a short period repeats."""
        known = tokens[source : source + count].tolist()
        period = len(tokens) - source
        for place in range(len(known), count):
            known.append(known[place - period])
        return known


class NgramDrafter(Drafter):
    def __init__(self, *, shortest: int = 2, longest: int = 4) -> None:
        whole_number(shortest, "prompt_lookup_min", at_least=1)
        whole_number(longest, "prompt_lookup_max", at_least=1)
        if shortest > longest:
            raise ConfigError(f"prompt_lookup_min ({shortest}) must not exceed prompt_lookup_max ({longest})")
        self.footprint = footprint_for("ngram", DrafterShape())
        self._shortest, self._longest = shortest, longest
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        drafts = []
        for request, _v, k in rows:
            index = self._indexes.get(request.id)
            if index is None:
                index = self._indexes[request.id] = NgramIndex(self._shortest, self._longest)
            drafts.append(index.follow(request.tokens, k))
        return drafts

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
