"""Prompt look-up: proposes the tokens that followed the last few tokens when these occurred before.

Each request has an index from n-grams to the position after their latest occurrence, extended as tokens are
committed, so that a step costs the same however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.errors import ConfigError
from outrider.kv.archetypes import ARCHETYPES, DrafterShape, lookup
from outrider.kv.checked import whole_number
from outrider.speculative.drafter import Drafter, ProposeRow
from outrider.speculative.method import DrafterMethod


class NgramIndex:
    """The latest occurrences of the n-grams of one text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        """For each n-gram, the position after its latest occurrence that is followed by another token."""
        self._indexed = 0
        """All n-grams that end before this position are in the index."""

    def follow(self, tokens: array[int], count: int) -> list[int]:
        """Returns the tokens that followed the longest n-gram at the end of the text when it occurred before."""
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
        """Indexes all n-grams but those at the very end, which no token follows yet."""
        last = len(tokens) - 1
        for end in range(self._indexed + 1, last + 1):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, last)

    @staticmethod
    def _continuation(tokens: array[int], source: int, count: int) -> list[int]:
        """Copies `count` tokens from `source`; past the end of the text the copy repeats what it has copied."""
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
        self.footprint = lookup("ngram", DrafterShape())
        self._shortest, self._longest = shortest, longest
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        drafts = []
        for request, _v, k, _tap_row in rows:
            index = self._indexes.get(request.id)
            if index is None:
                index = self._indexes[request.id] = NgramIndex(self._shortest, self._longest)
            drafts.append(index.follow(request.tokens, k))
        return drafts

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


NGRAM = DrafterMethod(
    name="ngram",
    title="n-gram look-up",
    archetype=ARCHETYPES["lookup"],
    load=lambda config, settings: NgramDrafter(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max),
    options=frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
)
