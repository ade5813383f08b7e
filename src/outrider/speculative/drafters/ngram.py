"""Prompt look-up: proposes the tokens that followed the last few tokens when these occurred before.

Each request has an index of its own text, extended as tokens are committed, so that a step costs the same however long
the text is. Matches that are longer than `prompt_lookup_max` count as equally long, and the latest of them is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import ConfigError
from outrider.kv.archetypes import ARCHETYPES, DrafterShape, lookup
from outrider.kv.checked import whole_number
from outrider.speculative.drafter import Drafter, ProposeRow
from outrider.speculative.lookup import Lookup, LookupConfig
from outrider.speculative.method import DrafterMethod

ALONE = ""
"""The salt of all requests: a text is looked up in itself only."""


class NgramDrafter(Drafter):
    def __init__(self, *, shortest: int = 2, longest: int = 4) -> None:
        whole_number(shortest, "prompt_lookup_min", at_least=1)
        whole_number(longest, "prompt_lookup_max", at_least=1)
        if shortest > longest:
            raise ConfigError(f"prompt_lookup_min ({shortest}) must not exceed prompt_lookup_max ({longest})")
        self.footprint = lookup("ngram", DrafterShape())
        self.lookup = LookupConfig(shortest_match=shortest)
        self._lookup = Lookup(LookupConfig(shortest_match=shortest, longest_match=longest, most_shared_tokens=0))

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        found = [self._lookup.find(request.id, ALONE, request.tokens, k) for request, _v, k, _tap_row in rows]
        return [matches[0].drafts if matches else [] for matches in found]

    def forget(self, request_id: str) -> None:
        self._lookup.forget(request_id)


NGRAM = DrafterMethod(
    name="ngram",
    title="n-gram look-up",
    archetype=ARCHETYPES["lookup"],
    load=lambda config, settings: NgramDrafter(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max),
    options=frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
)
