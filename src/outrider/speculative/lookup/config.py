"""The settings of the look-up."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number

LONGEST_KEY = 8
"""Longer keys than this find nothing that these do not find: few runs of eight tokens occur often by chance."""


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class LookupConfig:
    shortest_match: int = 3
    """Least number of last tokens that must have occurred before in the request's own text."""
    longest_match: int = 32
    """Longer matches than this count as equally long, and the latest of them is taken."""
    shortest_shared_match: int = 5
    """Least number of last tokens that must occur in another text. Short runs of tokens occur in many texts by
    chance."""
    most_shared_tokens: int = 1_000_000
    """Number of tokens of finished texts to keep, of all tenants; about 37 bytes each. 0: no text is shared."""
    most_candidates: int = 64
    """Most earlier occurrences to compare for each length of key, the latest ones. It bounds the time of a call."""

    def __post_init__(self) -> None:
        for name in ("shortest_match", "longest_match", "shortest_shared_match", "most_candidates"):
            whole_number(getattr(self, name), name, at_least=1)
        whole_number(self.most_shared_tokens, "most_shared_tokens", at_least=0, advice="0 shares no text")
        for name in ("shortest_match", "shortest_shared_match") if self.most_shared_tokens else ("shortest_match",):
            if getattr(self, name) > self.longest_match:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must not exceed longest_match ({self.longest_match})"
                )

    @property
    def own_keys(self) -> tuple[int, ...]:
        """Lengths of the keys in the index of a request's own text, longest first."""
        longest = max(self.shortest_match, min(LONGEST_KEY, self.longest_match))
        return tuple(sorted({self.shortest_match, (self.shortest_match + longest) // 2, longest}, reverse=True))

    @property
    def shared_keys(self) -> tuple[int, ...]:
        """Lengths of the keys in the index of finished texts, longest first."""
        longest = max(self.shortest_shared_match, min(LONGEST_KEY, self.longest_match))
        return tuple(sorted({self.shortest_shared_match, longest}, reverse=True))
