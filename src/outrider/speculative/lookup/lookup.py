"""The look-up as the engine uses it: one text for each request, and the finished texts that requests may copy from."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculative.lookup.config import LookupConfig
from outrider.speculative.lookup.match import Match
from outrider.speculative.lookup.own import OwnText
from outrider.speculative.lookup.shared import SharedTexts


class Lookup:
    """Finds drafts for requests by their keys. What it finds depends only on the calls before.

    find     at any step, with the whole text: prompt, committed tokens, and what was just sampled
    finish   the text is complete, and enters the tenant's finished texts
    forget   the request ended without a text to share
    """

    def __init__(self, config: LookupConfig) -> None:
        self._config = config
        self._own: dict[str, OwnText] = {}
        self._shared: SharedTexts | None = None
        self.lookups = 0
        self.own_hits = 0
        self.shared_hits = 0
        self._indexed_tokens = 0
        self._evicted_texts = 0

    @property
    def indexed_tokens(self) -> int:
        """Number of tokens that entered an index, of requests' own texts and of finished ones."""
        return self._indexed_tokens + (self._shared.indexed_tokens if self._shared is not None else 0)

    @property
    def shared_tokens(self) -> int:
        """Number of tokens of finished texts that are kept."""
        return self._shared.tokens if self._shared is not None else 0

    @property
    def evicted_texts(self) -> int:
        """Number of finished texts that made room for later ones."""
        return self._evicted_texts + (self._shared.evicted_texts if self._shared is not None else 0)

    @property
    def memory_bytes(self) -> int:
        """Size of the texts and their indexes."""
        own = sum(text.memory_bytes for text in self._own.values())
        return own + (self._shared.memory_bytes if self._shared is not None else 0)

    def find(self, key: str, salt: str, tokens: Sequence[int], k: int) -> list[Match]:
        """Returns what followed the longest occurrence of the end of the text, at most `k` tokens of it: in the text
        itself, and in a finished text of the same salt if more tokens agree there. With k = 0 only the index is brought
        up to date."""
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = OwnText(self._config)
        self._indexed_tokens += own.follow(tokens)
        if k <= 0:
            return []
        self.lookups += 1
        recent = list(tokens[-self._config.longest_match :])
        recent.reverse()
        found = own.find(recent, k)
        matches = [] if found is None else [found]
        self.own_hits += len(matches)
        length = found.length if found is not None else 0
        if self._shared is not None and length < len(recent):
            longer = self._shared.find(salt, recent, length + 1, k)
            if longer is not None:
                self.shared_hits += 1
                matches.append(longer)
        return matches

    def finish(self, key: str, salt: str, tokens: Sequence[int]) -> None:
        """Has the requests of the same salt copy from this text, and drops what is kept for the request itself."""
        self.forget(key)
        if self._config.most_shared_tokens:
            if self._shared is None:
                self._shared = SharedTexts(self._config)
            self._shared.add(salt, tokens)

    def forget(self, key: str) -> None:
        """Drops what is kept for a request; its text is not shared."""
        self._own.pop(key, None)

    def clear_counts(self) -> None:
        """Counts calls, and what they found, from zero."""
        self.lookups = self.own_hits = self.shared_hits = 0

    def reset(self) -> None:
        """Drops all finished texts. Requests keep what they copy from themselves."""
        self._indexed_tokens, self._evicted_texts = self.indexed_tokens, self.evicted_texts
        self._shared = None
