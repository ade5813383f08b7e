"""The same look-up by a search of every position of every text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.speculative.lookup import LookupConfig, Match


def agreeing(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Returns how many tokens at the ends of two texts agree."""
    length = 0
    while length < min(most, len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def searched_own(tokens: Sequence[int], k: int, config: LookupConfig) -> Match | None:
    """The latest of the longest earlier occurrences in the text. A copy that reaches its end goes on in the copy."""
    best, source = config.shortest_match - 1, -1
    for end in range(len(tokens) - 1, 0, -1):
        length = agreeing(tokens[:end], tokens, config.longest_match)
        if length > best:
            best, source = length, end
    if source < 0:
        return None
    text = list(tokens)
    for place in range(k):
        text.append(text[source + place])
    return Match(text[len(tokens) :], best, False)


def searched_shared(
    texts: Iterable[Sequence[int]], tokens: Sequence[int], k: int, config: LookupConfig
) -> Match | None:
    """The latest of the longest occurrences in finished texts, which are given oldest first."""
    best, drafts = config.shortest_shared_match - 1, None
    for text in reversed(list(texts)):
        for end in range(len(text) - 1, 0, -1):
            length = agreeing(text[:end], tokens, config.longest_match)
            if length > best:
                best, drafts = length, list(text[end : end + k])
    return None if drafts is None else Match(drafts, best, True)


def searched(texts: Iterable[Sequence[int]], tokens: Sequence[int], k: int, config: LookupConfig) -> list[Match]:
    """That of the text itself, and then that of the finished texts if it is longer."""
    own, shared = searched_own(tokens, k, config), searched_shared(texts, tokens, k, config)
    longer = shared is not None and (own is None or shared.length > own.length)
    return [match for match, wanted in ((own, True), (shared, longer)) if match is not None and wanted]


def only(match: Match | None) -> list[Match]:
    return [] if match is None else [match]
